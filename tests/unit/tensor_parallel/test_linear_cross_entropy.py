"""The fused head against torch's own linear map and cross entropy."""

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.profiler import ProfilerActivity, profile

from mcore.tensor_parallel.cross_entropy import (
    LossOptions,
    _VocabParallelCrossEntropy,
    vocab_parallel_cross_entropy,
)
from mcore.tensor_parallel.linear_cross_entropy import (
    _LinearCrossEntropy,
    linear_cross_entropy,
)
from mcore.topology.group import Group
from tests.unit.tensor_parallel.helpers import run_at

S, B, H, V = 6, 2, 8, 11  # the vocabulary is padded to 12


def _inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, B, H, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(12, H, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(V, (S, B), generator=generator)
    target[1, 1] = -100
    grad = torch.rand(S, B, generator=generator, dtype=torch.float64)
    return hidden, weight, target, grad


def _plain(hidden, weight, target, smoothing, z):
    logits = (hidden @ weight[:V].t()).double().flatten(0, 1)
    ids = target.flatten()
    loss = F.cross_entropy(logits, ids, reduction="none", label_smoothing=smoothing)
    return (loss + z * logits.logsumexp(-1).square().masked_fill(ids < 0, 0.0)).view(S, B)


def _expected(smoothing, z):
    hidden, weight, target, grad = _inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = _plain(hidden, weight, target, smoothing, z)
    loss.backward(grad)
    return loss.detach(), hidden.grad, weight.grad


def _close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def _check_at(group, smoothing, z, sequence_parallel, fused, tokens_per_chunk):
    rows, steps = 12 // group.size, S // group.size
    mine = slice(group.rank * rows, (group.rank + 1) * rows)
    here = slice(group.rank * steps, (group.rank + 1) * steps) if sequence_parallel else slice(S)
    hidden, weight, target, grad = _inputs()
    hidden, weight = hidden[here].clone().requires_grad_(), weight[mine].clone().requires_grad_()
    if fused:
        weight.main_grad = torch.ones_like(weight)
    options = LossOptions(group, rows, V, smoothing, z, chunk_elements=tokens_per_chunk * rows)
    loss = linear_cross_entropy(
        hidden,
        weight,
        target,
        options,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=fused,
    )
    loss.backward(grad)
    wanted_loss, wanted_hidden, wanted_weight = _expected(smoothing, z)
    _close(loss.detach(), wanted_loss)
    _close(hidden.grad, wanted_hidden[here])
    _close(weight.main_grad - 1.0 if fused else weight.grad, wanted_weight[mine])


@pytest.mark.dist
@pytest.mark.parametrize(
    ("tp", "smoothing", "z", "sequence_parallel", "fused", "chunk"),
    [(1, 0.0, 0.0, False, False, 5), (1, 0.1, 0.3, False, True, 1), (2, 0.1, 0.3, True, True, 5),
     (2, 0.0, 0.0, False, False, 100)],
)  # fmt: skip
def test_equals_the_plain_formula(tp, smoothing, z, sequence_parallel, fused, chunk):
    run_at(tp, _check_at, smoothing, z, sequence_parallel, fused, chunk)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_inputs(dtype, fused):
    """Against fp64 of the same rounded inputs: loss in fp32, sums over chunks in fp32."""
    hidden, weight, target, grad = _inputs(dtype)
    wide_hidden, wide_weight = (x.double().requires_grad_() for x in (hidden, weight))
    expected = _plain(wide_hidden, wide_weight, target, 0.1, 0.01)
    expected.backward(grad)
    hidden.requires_grad_()
    weight.requires_grad_()
    if fused:
        weight.main_grad = torch.zeros(weight.shape)
    options = LossOptions(Group.single("tp"), 12, V, 0.1, 0.01, chunk_elements=5 * 12)
    loss = linear_cross_entropy(
        hidden,
        weight,
        target,
        options,
        sequence_parallel=False,
        gradient_accumulation_fusion=fused,
    )
    assert loss.dtype == torch.float32
    loss.backward(grad.float())
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), expected, rtol=4 * unit, atol=4 * unit)
    weight_grad = weight.main_grad if fused else weight.grad
    for got, wanted in ((hidden.grad, wide_hidden.grad), (weight_grad, wide_weight.grad)):
        assert (got.double() - wanted).abs().max() <= 4 * unit * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_past_the_range_of_fp16(dtype):
    """Products of finite fp16 numbers that fp16 cannot hold: the loss stays finite."""
    hidden = torch.full((1, 1, 4), 150.0, dtype=dtype, requires_grad=True)
    weight = torch.stack([torch.full((4,), x) for x in (200.0, -200.0, 100.0)]).to(dtype)
    assert not torch.isfinite((hidden[0] @ weight.t()).half()).all()
    weight.requires_grad_()
    options = LossOptions(Group.single("tp"), 3, 3)
    loss = linear_cross_entropy(
        hidden,
        weight,
        torch.tensor([[2]]),
        options,
        sequence_parallel=False,
        gradient_accumulation_fusion=False,
    )
    assert loss.item() == pytest.approx(60000.0, rel=1e-2)
    loss.sum().backward()
    assert hidden.grad.flatten().tolist() == pytest.approx([100.0] * 4)
    assert torch.isfinite(weight.grad).all()


def _check_given_logits(group, smoothing, z):
    hidden, weight, target, grad = _inputs()
    logits = (hidden @ weight.t()).chunk(group.size, -1)[group.rank].contiguous().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target, smoothing, z_loss=z, vocab_size=V)
    loss.backward(grad)
    whole = (hidden @ weight.t()).requires_grad_()
    expected = _plain(whole, torch.eye(12, dtype=torch.float64), target, smoothing, z)
    expected.backward(grad)
    _close(loss.detach(), expected.detach())
    _close(logits.grad, whole.grad.chunk(group.size, -1)[group.rank])


@pytest.mark.dist
@pytest.mark.parametrize("tp", [1, 2])
def test_smoothing_and_z_loss_of_given_logits(tp):
    run_at(tp, _check_given_logits, 0.2, 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_huge_logits_stay_finite(dtype):
    logits = torch.tensor([[60000.0, -60000.0, 64000.0]], dtype=dtype).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([0]))
    expected = F.cross_entropy(logits.detach().double(), torch.tensor([0]))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.sum().backward()
    assert logits.grad.tolist() == [[-1.0, 0.0, 1.0]]


def _peak_of(work):
    """Most bytes that torch's allocator gave out at once."""
    gc.collect()  # what earlier tests left would be freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held)


@pytest.mark.parametrize("fused", [False, True])
def test_one_chunk_of_logits_exists_at_a_time(fused):
    tokens, rows = 64, 5000
    hidden, weight = torch.randn(tokens, 1, 8), torch.randn(rows, 8).requires_grad_()
    weight.main_grad = torch.zeros_like(weight)
    logits = (hidden.flatten(0, 1) @ weight.detach().t()).requires_grad_()
    target = torch.randint(rows, (tokens, 1))
    options = LossOptions(Group.single("tp"), rows, rows, chunk_elements=16 * rows)

    def work():
        if fused:
            loss = linear_cross_entropy(
                hidden.requires_grad_(), weight, target, options,
                sequence_parallel=False, gradient_accumulation_fusion=True,
            )  # fmt: skip
        else:
            loss = _VocabParallelCrossEntropy.apply(logits, target.flatten(), options)
        loss.sum().backward()

    work()
    logits.grad = hidden.grad = None
    kept = 0 if fused else logits.numel() * 4  # the gradient of given logits
    chunk = 16 * rows * 4
    assert chunk < _peak_of(work) - kept < 1.5 * chunk


@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.3)])
def test_numerical_gradients(smoothing, z):
    hidden, weight, target, _ = _inputs()
    options = LossOptions(Group.single("tp"), 12, V, smoothing, z, chunk_elements=5 * 12)

    def losses(hidden, weight):
        ids = target.flatten()
        return _LinearCrossEntropy.apply(hidden.flatten(0, 1), weight, ids, options, False, None)

    assert gradcheck(losses, (hidden.requires_grad_(), weight.requires_grad_()))
