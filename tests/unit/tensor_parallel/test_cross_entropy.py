"""Vocabulary-parallel cross entropy against torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from mcore import tensor_parallel
from mcore.errors import ShapeError
from tests.unit.tensor_parallel.helpers import draw, own, run_at

pytestmark = pytest.mark.dist

S, B = 5, 3


def _problem(vocab, padded, dtype, scale):
    """Logits with huge padding columns, and targets that include the first and the last id."""
    logits = torch.full((S, B, padded), 1e9, dtype=torch.float64)
    logits[..., :vocab] = draw(S, B, vocab, seed=1) * scale
    target = torch.randint(vocab, (S, B), generator=torch.Generator().manual_seed(2))
    target[0, 0], target[0, 1] = 0, vocab - 1
    return logits.to(dtype), target


def _loss(group, vocab, padded, dtype, scale):
    logits, target = _problem(vocab, padded, dtype, scale)
    mine = own(logits, -1, group).requires_grad_()
    before = mine.detach().clone()
    loss = tensor_parallel.vocab_parallel_cross_entropy(mine, target, vocab_size=vocab)
    grad = draw(S, B, seed=3, dtype=loss.dtype)
    grad_before = grad.clone()
    loss.backward(grad)
    assert torch.equal(mine.detach(), before)
    assert torch.equal(grad, grad_before)
    return loss.detach(), mine.grad


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("vocab", "per_rank_rounds", "dtype", "scale"),
    [
        (12, 1, torch.float64, 1.0),
        (997, 1, torch.float64, 4.0),
        (5, 1, torch.float64, 1.0),  # at 4 ranks the last has no used column
        (997, 1, torch.float32, 4.0),
        (997, 1, torch.float64, 30000.0),  # logits past 60,000
        (997, 1, torch.float32, 30000.0),
        (997, 1, torch.bfloat16, 4.0),
        (997, 1, torch.bfloat16, 30000.0),
        (12, 3, torch.float64, 1.0),  # padding over several ranks
    ],
)
def test_loss_and_gradient(tp, vocab, per_rank_rounds, dtype, scale):
    padded = -(-vocab // tp) * tp * per_rank_rounds
    logits, target = _problem(vocab, padded, dtype, scale)
    if scale > 1000:
        assert logits[..., :vocab].max() > 60000
    x = logits[..., :vocab].double().requires_grad_()
    expected = F.cross_entropy(x.flatten(0, 1), target.flatten(), reduction="none").view(S, B)
    results = run_at(tp, _loss, vocab, padded, dtype, scale)
    loss_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    expected.backward(draw(S, B, seed=3, dtype=loss_dtype).double())
    for loss, _ in results:
        assert loss.dtype == loss_dtype
        torch.testing.assert_close(
            loss.double(), expected.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
    grad = torch.cat([grad for _, grad in results], -1)
    assert grad.dtype == dtype
    assert not grad[..., vocab:].any()
    tolerance = 8e-3 if dtype == torch.bfloat16 else TOLERANCE[dtype]
    torch.testing.assert_close(
        grad[..., :vocab].double(), x.grad, rtol=tolerance, atol=TOLERANCE[dtype]
    )


def _strange_targets(group):
    logits = draw(4, 8)
    mine = own(logits, -1, group).requires_grad_()
    target = torch.tensor([3, -100, -1, 4])
    loss = tensor_parallel.vocab_parallel_cross_entropy(mine, target, vocab_size=5)
    loss.sum().backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_negative_targets_are_ignored(tp):
    results = run_at(tp, _strange_targets)
    expected = F.cross_entropy(draw(4, 8)[:, :5], torch.tensor([3, 0, 0, 4]), reduction="none")
    for loss, _ in results:
        torch.testing.assert_close(loss[[0, 3]], expected[[0, 3]])
        assert loss[1] == loss[2] == 0
    grad = torch.cat([grad for _, grad in results], -1)
    assert grad[[0, 3]].any()
    assert not grad[1:3].any()


def _target_in_padding(group):
    target = torch.tensor([0, 1, 5, 8])  # 5 is a padding column, 8 is past it
    logits = own(draw(4, 8), -1, group)
    return tensor_parallel.vocab_parallel_cross_entropy(logits, target, vocab_size=5)


@pytest.mark.parametrize("tp", [2, 4])
def test_targets_past_the_vocabulary_give_no_number(tp):
    for loss in run_at(tp, _target_in_padding):
        assert loss.isnan().tolist() == [False, False, True, True]


def _check(group):
    del group
    target = torch.tensor([0, 4, 2])
    whole = draw(3, 8).requires_grad_()

    def loss(whole):
        mine = tensor_parallel.scatter_to_tensor_model_parallel_region(whole)
        return tensor_parallel.vocab_parallel_cross_entropy(mine, target, vocab_size=5)

    assert gradcheck(loss, (whole,))


@pytest.mark.parametrize("tp", [1, 2])
def test_finite_differences(tp):
    run_at(tp, _check)


def test_shapes_are_checked():
    with pytest.raises(ShapeError, match=r"target has shape \[3, 5\], logits \[5, 3, 8\]"):
        tensor_parallel.vocab_parallel_cross_entropy(
            torch.zeros(5, 3, 8), torch.zeros(3, 5, dtype=torch.long)
        )
