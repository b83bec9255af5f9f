"""Rank layouts against Megatron-Core's tables and a brute-force count."""

import itertools
import json
from pathlib import Path

import pytest

from mcore.errors import TopologyError
from mcore.topology.rank_layout import RankLayout, data_parallel_size

TABLES = json.loads((Path(__file__).parents[2] / "golden" / "rank_groups.json").read_text())


@pytest.mark.parametrize(
    "case", TABLES, ids=lambda c: f"{c['order']}-{c['tp']}{c['pp']}{c['cp']}{c['dp']}"
)
def test_groups_equal_megatrons(case):
    sizes = {axis: case[axis] for axis in ("tp", "pp", "cp", "dp")}
    groups = dict(RankLayout(**sizes, order=case["order"]).named_groups())
    for name, expected in case["groups"].items():
        assert [list(ranks) for ranks in groups[name]] == expected


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-pp-dp", "pp-dp-cp-tp"])
def test_groups_are_the_ranks_that_share_every_other_coordinate(order):
    layout = RankLayout(tp=2, cp=3, dp=2, pp=2, order=order)
    assert sorted(layout.rank(**layout.coords(r)) for r in range(24)) == list(range(24))
    for count in range(1, 5):
        for axes in itertools.combinations(("tp", "cp", "dp", "pp"), count):
            for rank in range(24):
                mine = layout.coords(rank)
                expected = [
                    other
                    for other in range(24)
                    if all(layout.coords(other)[a] == mine[a] for a in mine if a not in axes)
                ]
                assert list(layout.group_of(rank, axes)) == expected
                assert layout.group_of(rank, axes) in layout.groups(axes)


def test_embedding_groups():
    groups = dict(RankLayout(tp=2, pp=4, dp=2).named_groups())
    assert groups["embedding"] == [(0, 12), (1, 13), (2, 14), (3, 15)]
    assert groups["position-embedding"] == [(0,), (1,), (2,), (3,)]
    assert dict(RankLayout(tp=2).named_groups())["embedding"] == [(0,), (1,)]


def test_missing_axes_of_size_one_may_be_left_out():
    assert RankLayout(tp=2, dp=2, order="tp-ep-dp").groups("dp") == [(0, 2), (1, 3)]
    with pytest.raises(TopologyError, match="leaves out pp"):
        RankLayout(pp=2, order="tp-dp")


@pytest.mark.parametrize("order", ["tp-tp", "tp-xx", ""])
def test_bad_orders_are_refused(order):
    with pytest.raises(TopologyError):
        RankLayout(order=order)


def test_sizes_and_ranks_are_checked():
    with pytest.raises(TopologyError, match="tp size is 0"):
        RankLayout(tp=0)
    with pytest.raises(TopologyError, match="rank 4"):
        RankLayout(tp=4).coords(4)


def test_data_parallel_size_names_the_fit():
    assert data_parallel_size(16, tp=2, pp=4) == 2
    with pytest.raises(TopologyError, match="start 4 or 8 processes"):
        data_parallel_size(6, tp=2, pp=2)
    with pytest.raises(TopologyError, match="start 4 processes"):
        data_parallel_size(1, tp=2, pp=2)
