"""A world of 16,384 ranks costs a second and little memory, without a cluster."""

import json
import subprocess
import sys
import time

import pytest

from mcore.topology.rank_layout import AXIS_GROUPS, RankLayout

SIZES = {"tp": 8, "cp": 2, "dp": 64, "pp": 16}
RANKS = 16_384


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-pp-dp"])
def test_layout_and_all_groups_of_one_rank(order):
    start = time.process_time()
    layout = RankLayout(**SIZES, order=order)
    rank = 12_345
    groups = {axes: layout.group_of(rank, axes) for axes in AXIS_GROUPS}
    lists = dict(layout.named_groups())
    embedding = layout.embedding_group_of(rank)
    position = layout.position_embedding_group_of(rank)
    assert time.process_time() - start < 1.0

    assert layout.world_size == RANKS
    for axes, group in groups.items():
        size = 1
        for axis in axes.split("-"):
            size *= SIZES[axis]
        assert len(group) == len(set(group)) == size
        assert rank in group
        assert group in lists[axes]
        assert len(lists[axes]) == RANKS // size
    assert embedding == (groups["pp"][0], groups["pp"][-1])
    assert position == groups["pp"][:1]
    assert sum(map(len, lists["embedding"])) == 2 * RANKS // SIZES["pp"]


_PROGRAM = """
import json, sys, time
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from mcore import parallel_state

dist.init_process_group("fake", store=FakeStore(), rank=12345, world_size=16384)
start = time.perf_counter()
ctx = parallel_state.initialize_model_parallel(8, 16, context_parallel_size=2)
seconds = time.perf_counter() - start
with open("/proc/self/status") as file:  # unlike ru_maxrss it does not begin with the parent's
    peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024
groups = [ctx.tp, ctx.cp, ctx.dp, ctx.pp, ctx.dp_cp, ctx.mp, ctx.tp_cp, ctx.tp_dp_cp]
facts = {
    "seconds": seconds,
    "peak": peak,
    "sizes": [group.size for group in groups],
    "live": all(
        group.handle is not None
        and tuple(dist.get_process_group_ranks(group.handle)) == group.ranks
        for group in groups
    ),
}
print(json.dumps(facts))
"""


def test_initialisation_on_the_fake_process_group():
    finished = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr
    facts = json.loads(finished.stdout)
    assert facts["seconds"] < 20
    assert facts["peak"] < 2 * 1024**3
    assert facts["sizes"] == [8, 2, 64, 16, 128, 128, 16, 1024]
    assert facts["live"]
