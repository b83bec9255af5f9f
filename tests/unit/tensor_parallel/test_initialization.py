"""Weights drawn by name and global position: the same whole matrix however it is cut."""

import pytest
import torch

from mcore.tensor_parallel.initialization import initialize_by_name_
from mcore.topology.group import Group
from mcore.topology.param_sharding import even_rows, replicated_sharding


def _member(size, rank):
    class Pretend(Group):
        def __post_init__(self):
            """A member without a communicator; cutting rows needs none."""

    return Pretend("tp", tuple(range(size)), rank, None)


def _assemble(shape, dim, tp, blocks=1, used=None, **options):
    whole = torch.full(shape, torch.nan)
    for rank in range(tp):
        cut = even_rows(-(-shape[dim] // tp) * tp, _member(tp, rank), blocks=blocks, used=used)
        others = [size for axis, size in enumerate(shape) if axis != dim]
        sharding = cut.sharding(*others, dim=dim)
        others.insert(dim, cut.local)
        local = torch.full(others, torch.nan)
        initialize_by_name_(local, sharding, **options)
        assert not local.isnan().any()  # padding is zero
        for piece, view in sharding.views(local):
            whole.narrow(dim, piece.global_start, piece.length).copy_(view)
    return whole


@pytest.mark.parametrize(
    ("shape", "dim", "blocks"),
    [((200, 12), 0, 1), ((200, 12), 1, 1), ((256,), 0, 1), ((264, 3), 0, 2)],
)
def test_values_do_not_depend_on_the_cut(shape, dim, blocks):
    options = {"name": "decoder.layers.0.weight", "seed": 1, "std": 0.5}
    alone = _assemble(shape, dim, 1, blocks, **options)
    assert not alone.isnan().any()
    for tp in (2, 4):
        assert torch.equal(_assemble(shape, dim, tp, blocks, **options), alone)


def test_vocabulary_padding_changes_nothing():
    options = {"name": "embedding", "seed": 1, "std": 0.5}
    alone = _assemble((997, 4), 0, 1, used=997, **options)
    assert torch.equal(_assemble((997, 4), 0, 4, used=997, **options), alone)


def test_values_are_normal_and_depend_on_seed_name_and_block():
    options = {"name": "a", "seed": 1, "std": 0.5}
    drawn = _assemble((256, 256), 0, 1, **options)
    assert drawn.std() == pytest.approx(0.5, rel=0.01)
    assert abs(drawn.mean()) < 0.01
    assert not torch.equal(drawn[:64], drawn[64:128])
    assert not torch.equal(drawn, _assemble((256, 256), 0, 1, **{**options, "seed": 2}))
    assert not torch.equal(drawn, _assemble((256, 256), 0, 1, **{**options, "name": "b"}))
    assert torch.equal(drawn * 2, _assemble((256, 256), 0, 1, **{**options, "std": 1.0}))


def test_the_default_generator_is_left_alone():
    before = torch.get_rng_state()
    param = torch.empty(4, 4)
    initialize_by_name_(
        param, replicated_sharding((4, 4), Group.single("tp")), name="a", seed=1, std=1.0
    )
    assert torch.equal(torch.get_rng_state(), before)
