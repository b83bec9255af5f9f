"""Vocabulary-parallel embedding against torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F

from mcore.config.parallel import ModelParallelConfig
from mcore.errors import ShapeError
from mcore.tensor_parallel import VocabParallelEmbedding
from mcore.topology.param_sharding import sharding_of
from tests.unit.tensor_parallel.helpers import backward_unchanged, draw, own, run_at

pytestmark = pytest.mark.dist

B, S, H = 3, 8, 6
CONFIG = ModelParallelConfig(params_dtype=torch.float64)


def _embed(group, vocab, padded, scatter):
    torch.manual_seed(5)
    table = torch.nn.init.normal_(torch.empty(vocab, H, dtype=torch.float64)).requires_grad_()
    ids = torch.randint(vocab, (B, S), generator=torch.Generator().manual_seed(1))
    ids[0, 0] = vocab - 1
    y = F.embedding(ids, table)
    if scatter:
        y = y.transpose(0, 1)
    dy = draw(*y.shape, seed=2)
    y.backward(dy)

    torch.manual_seed(5)
    layer = VocabParallelEmbedding(
        vocab, H, config=CONFIG, reduce_scatter_embeddings=scatter, padded_size=padded
    )
    out = layer(ids)
    expected = own(y.detach(), 0, group) if scatter else y.detach()
    assert torch.equal(out.detach(), expected)
    backward_unchanged(out, own(dy, 0, group) if scatter else dy.clone())

    sharding = sharding_of(layer.weight, group)
    assert sharding.global_shape == (vocab, H)
    covered = torch.zeros(len(layer.weight), dtype=torch.bool)
    for piece, rows in sharding.views(layer.weight.detach()):
        whole = slice(piece.global_start, piece.global_start + piece.length)
        assert torch.equal(rows, table.detach()[whole])
        covered[piece.local_start : piece.local_start + piece.length] = True
        (grad,) = [v for p, v in sharding.views(layer.weight.grad) if p == piece]
        torch.testing.assert_close(grad, table.grad[whole], rtol=0, atol=1e-12)
    assert not layer.weight.detach()[~covered].any()
    assert not layer.weight.grad[~covered].any()
    return sum(piece.length for piece in sharding.pieces), len(layer.weight)


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize(
    ("tp", "vocab", "padded"),
    [
        (1, 12, None),
        (1, 12, 16),
        (2, 12, None),
        (4, 12, None),
        (4, 997, None),
        (4, 5, None),  # the last rank holds padding only
        (4, 12, 128),
        (2, 12, 24),  # one rank holds all rows
    ],
)
def test_rows_values_and_gradients(tp, vocab, padded, scatter):
    results = run_at(tp, _embed, vocab, padded, scatter)
    assert sum(rows for rows, _ in results) == vocab
    assert sum(local for _, local in results) == (padded or -(-vocab // tp) * tp)


def _strange_ids(group):
    del group
    layer = VocabParallelEmbedding(5, H, padded_size=8)
    ids = torch.tensor([[0, 4, 5, 7, 8, -1]])
    return layer(ids).isnan().all(-1)[0].tolist()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ids_outside_the_vocabulary_never_pass_for_words(tp):
    for result in run_at(tp, _strange_ids):
        assert result == [False, False, True, True, True, True]


def test_padded_size_is_checked():
    with pytest.raises(ShapeError, match=r"padded_size \(4\) is below num_embeddings \(5\)"):
        VocabParallelEmbedding(5, H, padded_size=4)
