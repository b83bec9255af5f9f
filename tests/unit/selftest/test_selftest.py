"""The self-test passes on a healthy machine, and sees what is wrong on a sick one."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mcore.cli.selftest import _checkpoint, _Printer
from mcore.errors import CheckpointError
from mcore.selftest import SelfTest, collective_checks, selftest
from mcore.selftest.layouts import fitting_layouts
from mcore.selftest.tiny_training import TinyTraining
from mcore.testing import run_distributed
from mcore.topology.collectives import all_reduce
from mcore.topology.rank_layout import RankLayout
from mcore.training.initialize import Launch, host_group

CPU = torch.device("cpu")


def run_whole(folder):
    test = SelfTest(dist.get_world_size(), CPU, message_bytes=100_000)
    groups, compared = list(test.collectives()), list(test.layouts())
    trips = list(test.round_trips(Path(folder)))
    return groups, compared, trips, test.faults


@pytest.mark.full
@pytest.mark.dist
def test_a_healthy_machine(tmp_path):
    for groups, compared, trips, faults in run_distributed(run_whole, 4, tmp_path, timeout=400):
        assert faults == []
        rows = [*groups, *compared, *trips]
        assert all(row.passed for row in rows)
        # Each partition of the ranks once: those of tp 4 are those of dp 4, of pp 2 those of dp 2,
        # and those of hybrid sharding those of tp 2 with dp 2.
        assert {(found.group, found.size) for found in groups} == {
            ("dp", 4), ("tp", 2), ("dp", 2), ("embedding", 2),
        }  # fmt: skip
        assert min(found.checks for found in groups) > 80
        assert all(min(found.slowest.values()) > 0 for found in groups)
        names = [row.layout for row in compared]
        assert len(set(names)) == len(names)
        assert {"dp4", "dp4 zero1", "dp4 zero2", "dp4 zero3", "tp2 pp2 sp", "pp2 dp2 vpp2"} <= {
            *names
        }
        assert len(trips) == 2
        assert trips[0].saved == trips[0].layout != trips[1].layout


def run_with_wrong_collective():
    """Rank 1 gets a wrong number where all reduce."""

    def wrong(x, group, op="sum"):
        result = all_reduce(x, group, op)
        if dist.get_rank() == 1 and op == "sum" and x.numel() > 1000:
            result = result.clone()
            result[777] += 1
        return result

    healthy, collective_checks.all_reduce = collective_checks.all_reduce, wrong
    try:
        test = SelfTest(dist.get_world_size(), CPU, message_bytes=1000)
        return [found.passed for found in test.collectives()], test.faults
    finally:
        collective_checks.all_reduce = healthy


@pytest.mark.dist
def test_a_wrong_collective_is_named_on_every_rank():
    for passed, faults in run_distributed(run_with_wrong_collective, 2):
        assert not any(passed)
        assert "all_reduce (sum) of float32 on group" in faults[0]
        assert "seen by rank 1: 1 of 262150 elements are wrong; the first, element 777" in faults[0]


def run_collectives_with_hosts():
    """As on GPUs, where the hosts have a backend of their own."""
    test = SelfTest(dist.get_world_size(), CPU, message_bytes=1000, host=host_group(1))
    return [(found.layout, found.group, found.size) for found in test.collectives()], test.faults


@pytest.mark.dist
def test_hosts_are_checked_too():
    for groups, faults in run_distributed(run_collectives_with_hosts, 2):
        assert (groups, faults) == ([("dp2", "dp", 2), ("hosts", "gloo", 2)], [])


@pytest.mark.parametrize(
    ("world_size", "tp", "pp", "wanted"),
    [
        (8, 2, 1, {"dp-shard": ((0, 2), (4, 6), (1, 3), (5, 7)),
                   "dp-replica": ((0, 4), (2, 6), (1, 5), (3, 7))}),
        (8, 1, 4, {"embedding": ((0, 6), (1, 7))}),
    ],
)  # fmt: skip
def test_groups_beside_the_axes(world_size, tp, pp, wanted):
    """Of Megatron's published order: tensor fastest, then data, then pipeline."""
    layout = RankLayout(tp=tp, pp=pp, dp=world_size // tp // pp)
    ctx = SimpleNamespace(layout=layout)
    found = {**{kind: ranks for kind, ranks, _ in selftest._usual_groups(ctx)},
             **{kind: ranks for kind, ranks, _ in selftest._hybrid_groups(ctx)}}  # fmt: skip
    for kind, ranks in wanted.items():
        assert found[kind] == ranks


class Sick(TinyTraining):
    """One weight of rank 1 is off by a millionth."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if self.ctx.layout.world_size > 1 and self.ctx.rank == 1:
            chunk = self.state.chunks[0]
            name, parameter = next(
                (name, p) for name, p in chunk.named_parameters() if "linear_fc2.weight" in name
            )
            # Arithmetic on a DTensor communicates, and one rank alone must not.
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            with torch.no_grad():
                local.view(-1)[5] += 1e-6


def run_with_wrong_weight():
    healthy, selftest.TinyTraining = selftest.TinyTraining, Sick
    try:
        test = SelfTest(dist.get_world_size(), CPU, message_bytes=1000)
        return {row.layout: row.passed for row in test.layouts()}, test.faults
    finally:
        selftest.TinyTraining = healthy


@pytest.mark.full
@pytest.mark.dist
def test_a_wrong_weight_is_seen_at_plain_layouts():
    for passed, faults in run_distributed(run_with_wrong_weight, 2):
        assert not passed["dp2"]
        assert not passed["tp2"]
        assert not passed["pp2"]
        assert "loss differs by" in faults[0]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 8, 64, 512])
def test_layouts_fit(size):
    layouts = fitting_layouts(size)
    assert all(size % (layout.tp * layout.pp) == 0 for layout in layouts)
    assert all(24 % layout.tp == 0 for layout in layouts)
    layers = 12 if size % 3 == 0 else 4
    assert all(layers % (layout.pp * layout.virtual) == 0 for layout in layouts)
    assert len({layout.name(size) for layout in layouts}) == len(layouts)


@pytest.mark.parametrize("size", [2, 40, 300])
@pytest.mark.parametrize("dtype", collective_checks.DTYPES)
def test_sums_of_the_checks_are_exact(size, dtype):
    shape = (512,)
    given = [collective_checks._numbers(shape, m, size, dtype, CPU) for m in range(size)]
    exact = torch.stack(given).double().sum(0)
    total = given[0]
    for other in given[1:]:
        total = total + other
    assert torch.equal(total.double(), exact)
    assert 0 < exact.max() <= 256


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_in_the_shared_folder(tmp_path, fails):
    def round_trips(folder):
        (folder / "iter_0000001").mkdir()
        if fails:
            raise CheckpointError("damaged")
        return []

    test = SimpleNamespace(rank=0, gather=lambda item: [item], round_trips=round_trips)
    with pytest.raises(CheckpointError) if fails else nullcontext():
        _checkpoint(test, _Printer(Launch(0, 1, 0), is_quiet=True), str(tmp_path), 2)
    assert list(tmp_path.iterdir()) == []
