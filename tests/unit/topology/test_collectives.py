"""Collectives and groups on gloo ranks, against plain arithmetic."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mcore import parallel_state
from mcore.errors import NotInitializedError, ShapeError, TopologyError
from mcore.testing import run_distributed
from mcore.topology import collectives
from mcore.topology.group import Group, as_group

pytestmark = pytest.mark.dist


def _tensor(rank, dtype=torch.float64):
    return torch.randn(6, 4, 8, dtype=dtype, generator=torch.Generator().manual_seed(rank))


def _gather_and_scatter(dim):
    group = parallel_state.initialize_model_parallel(dist.get_world_size()).tp
    x = _tensor(group.rank)
    before = x.clone()
    out = (
        collectives.all_gather_along_dim(x, dim, group),
        collectives.reduce_scatter_along_dim(x.repeat(6, 6, 6), dim, group),
        collectives.all_reduce(x, group),
        collectives.all_reduce(x, group, "max"),
    )
    assert torch.equal(x, before)
    return out


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_every_way_equals_plain_arithmetic(world_size, dim):
    inputs = [_tensor(rank) for rank in range(world_size)]
    total = sum(inputs)
    slices = total.repeat(6, 6, 6).chunk(world_size, dim)
    for rank, out in enumerate(run_distributed(_gather_and_scatter, world_size, dim)):
        torch.testing.assert_close(out[0], torch.cat(inputs, dim))
        torch.testing.assert_close(out[1], slices[rank])
        torch.testing.assert_close(out[2], total)
        torch.testing.assert_close(out[3], torch.stack(inputs).amax(0))


def _compare_ways():
    """The hand-built gloo way against gloo's own collectives."""
    group = parallel_state.initialize_model_parallel(4).tp
    x = _tensor(group.rank)
    own = torch.empty(24, 4, 8, dtype=x.dtype)
    dist.all_gather_into_tensor(own, x, group=group.handle)
    assert torch.equal(own, collectives.all_gather_along_dim(x, 0, group))
    wide = x.repeat(4, 1, 1)
    mine = collectives.reduce_scatter_along_dim(wide, 0, group)
    reduced = collectives.all_reduce(wide, group)
    torch.testing.assert_close(mine, reduced.chunk(4)[group.rank])
    return collectives.all_gather_along_dim(mine, 0, group)


def test_ways_agree_and_ranks_hold_the_same_bits():
    results = run_distributed(_compare_ways, 4)
    assert all(torch.equal(result, results[0]) for result in results)


def _gather_of(numbers):
    group = parallel_state.initialize_model_parallel(3).tp
    buffer = torch.zeros(3, numbers, dtype=torch.int64)
    buffer[group.rank] = torch.arange(numbers) * (group.rank + 1)
    gathered = collectives.all_gather_along_dim(buffer[group.rank].clone(), 0, group)
    collectives.start_all_gather_into_(buffer.view(-1), group).wait()
    return gathered, buffer


@pytest.mark.parametrize("numbers", [0, 1, 5, 50_000])
def test_a_gather_of_any_size(numbers):
    """Copies to all below some size, messages above it: 3 x 50,000 numbers are 1.2 MB."""
    wanted = torch.stack([torch.arange(numbers) * (rank + 1) for rank in range(3)])
    for gathered, buffer in run_distributed(_gather_of, 3, numbers):
        assert torch.equal(gathered.view(3, -1), wanted)
        assert torch.equal(buffer, wanted)


def _indivisible():
    group = parallel_state.initialize_model_parallel(2).tp
    collectives.reduce_scatter_along_dim(torch.ones(3), 0, group)


def test_indivisible_dimension_is_named():
    with pytest.raises(ShapeError, match=r"\[3\].*group tp \(2, ranks \[0, 1\]\)"):
        run_distributed(_indivisible, 2)


def _groups():
    ctx = parallel_state.initialize_model_parallel(2, 2)
    facts = {
        "ranks": (ctx.tp.ranks, ctx.pp.ranks, ctx.dp.ranks, ctx.mp.ranks),
        "stage": (
            parallel_state.is_pipeline_first_stage(),
            parallel_state.is_pipeline_last_stage(),
        ),
        "live": all(g.handle is not None for g in (ctx.tp, ctx.cp, ctx.dp, ctx.pp, ctx.dp_cp)),
        "src": parallel_state.get_tensor_model_parallel_src_rank(),
    }
    assert as_group(parallel_state.get_tensor_model_parallel_group()).ranks == ctx.tp.ranks
    with pytest.raises(TopologyError, match="already"):
        parallel_state.initialize_model_parallel(2, 2)
    return facts


def test_context_of_each_rank():
    results = run_distributed(_groups, 4)
    assert results[3] == {
        "ranks": ((2, 3), (1, 3), (3,), (0, 1, 2, 3)),
        "stage": (False, True),
        "live": True,
        "src": 2,
    }


def _middle_stage():
    parallel_state.initialize_model_parallel(1, 3)
    if dist.get_rank() == 1:
        with pytest.raises(TopologyError, match=r"embedding group, ranks \[0, 2\]"):
            parallel_state.get_embedding_group()
    return parallel_state.is_rank_in_embedding_group()


def test_a_stranger_to_a_group_is_told_its_members():
    assert run_distributed(_middle_stage, 3) == [True, False, True]


def _data_parallel_size_third():
    parallel_state.initialize_model_parallel(1, 1, 2)


def test_third_argument_that_looks_like_a_data_parallel_size_is_explained():
    with pytest.raises(TopologyError, match="not the data-parallel size"):
        run_distributed(_data_parallel_size_third, 2)


def test_no_torch_distributed_is_needed_alone():
    with pytest.raises(NotInitializedError, match="initialize_model_parallel"):
        parallel_state.get_tensor_model_parallel_rank()
    assert parallel_state.tensor_model_parallel_group_or(None).size == 1
    x = torch.ones(3)
    assert collectives.all_reduce(x, Group.single("tp")) is x
    parallel_state.initialize_model_parallel()
    assert parallel_state.get_data_parallel_world_size() == 1
    parallel_state.destroy_model_parallel()
    with pytest.raises(TopologyError, match="start 2 processes"):
        parallel_state.initialize_model_parallel(2)


def _groups_made(sizes):
    """Ranks of every process group that initialisation makes, besides the world's own."""
    made = []
    original = dist.new_group

    def new_group(ranks, **options):
        made.append(tuple(ranks))
        return original(ranks, **options)

    with mock.patch.object(dist, "new_group", new_group):
        parallel_state.initialize_model_parallel(**sizes)
    return made


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({}, []),
        ({"tensor_model_parallel_size": 4}, []),
        ({"pipeline_model_parallel_size": 4}, [(0, 3)]),  # the embedding's
        ({"tensor_model_parallel_size": 2}, [(0, 1), (2, 3), (0, 2), (1, 3)]),
    ],
)
def test_axes_of_one_rank_make_no_group(sizes, wanted):
    """The axis that has all ranks is the world's group, and axes of the same ranks share theirs."""
    for rank, made in enumerate(run_distributed(_groups_made, 4, sizes)):
        assert made == [(rank,), *wanted]  # itself alone, for all groups of one rank
