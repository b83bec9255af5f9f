"""Megatron's layout grammar, the balanced split, and that no layer is dropped or doubled."""

from __future__ import annotations

import pytest

from mcore.errors import ConfigError
from mcore.topology.placement import StagePlacement
from mcore.topology.stage_layout import layout_split, parse_layout
from mcore.topology.stages import balanced_split, stage_layers


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|(tt|)*2ttL", ("Ettt", "tt", "tt", "ttL")),
        ("E t, t | t t L", ("Ett", "ttL")),
        ("E|t*2|t*2|L", ("E", "tt", "tt", "L")),
        ("Et|((t|)*2tt|)*2L", ("Et", "t", "t", "tt", "t", "t", "tt", "L")),
        ("Et||tL", ("Et", "", "tL")),
        ("(Et|)t|*2tL", ("Et", "t", "", "tL")),
    ],
)
def test_layouts_written_out(text, stages):
    assert parse_layout(text) == stages
    layers = sum(stage.count("t") for stage in stages)
    split = layout_split(text, layers, 1)
    assert split == tuple(stage.count("t") for stage in stages)
    held = [layer for stage in range(len(split)) for layer in stage_layers(split, stage)]
    assert held == list(range(layers))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et|tx|tL", "has x where only E, t, L"),
        ("Et|(t|tL", r"has \( where only"),
        ("Et|tmL", "has a multi-token-prediction layer"),
        ("Et|t|tL", "has 3 stages, which must be a multiple of .* \\(2\\)"),
        ("tE|tL", "must begin with E and end with L"),
        ("Ett|", "must begin with E and end with L"),
        ("|EttL", "must begin with E and end with L"),
        ("EtE|tL", "has E or L more than once"),
        ("Ett|tL", "has 3 layers .* --num-layers is 2"),
        ("E(t*999)*999|L", "is longer than 100000"),
    ],
)
def test_what_is_no_layout(text, message):
    with pytest.raises(ConfigError, match=message):
        layout_split(text, 2, 2)


def rank_loads(split, placement, embedding, loss):
    loads = [0.0] * placement.num_ranks
    for stage, count in enumerate(split):
        ends = embedding * (stage == 0) + loss * (stage == len(split) - 1)
        loads[placement.locations[stage].rank] += count + ends
    return loads


@pytest.mark.parametrize("placement", [StagePlacement.usual(4), StagePlacement.usual(2, 2)])
def test_without_other_costs_the_balance_is_even(placement):
    assert balanced_split(12, placement, 0.0, 0.0) == (3, 3, 3, 3)


def test_a_large_vocabulary_takes_layers_off_the_last_stage():
    assert balanced_split(14, StagePlacement.usual(4), 0.1, 1.9) == (4, 4, 4, 2)
    assert balanced_split(6, StagePlacement.usual(4), 0.0, 9.0) == (2, 2, 2, 0)
    assert balanced_split(6, StagePlacement.v(2), 0.0, 2.0) == (2, 2, 2, 0)
    with pytest.raises(ConfigError, match=r"num_layers \(1\) cannot be balanced over 4 stages"):
        balanced_split(1, StagePlacement.usual(4), 0.0, 0.0)


def test_the_balance_is_the_best_there_is():
    for placement in (StagePlacement.usual(3), StagePlacement.usual(2, 2), StagePlacement.v(3)):
        for layers in range(placement.num_stages, 15):
            for costs in ((0.0, 0.0), (0.2, 0.7), (0.0, 2.5)):
                split = balanced_split(layers, placement, *costs)
                assert sum(split) == layers
                loads = rank_loads(split, placement, *costs)
                # Moving a layer off the most loaded rank would only load another one as much.
                assert max(loads) <= min(loads) + 1 or max(loads) <= max(costs) + 1
