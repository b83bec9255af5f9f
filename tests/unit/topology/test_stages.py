"""Layer splits: the published examples, and that no layer is ever dropped or doubled."""

from __future__ import annotations

import itertools

import pytest

from mcore.errors import ConfigError
from mcore.topology.placement import StagePlacement
from mcore.topology.stages import split_layers, stage_layers


def layers_by_rank(split, pp, v=1):
    placement = StagePlacement.usual(pp, v)
    return [[list(stage_layers(split, placement.stage(r, c))) for c in range(v)] for r in range(pp)]


def test_even():
    assert split_layers(12, 4) == (3, 3, 3, 3)
    assert layers_by_rank(split_layers(4, 2), 2) == [[[0, 1]], [[2, 3]]]


def test_even_virtual():
    assert layers_by_rank(split_layers(16, 4, 2), 4, 2) == [
        [[0, 1], [8, 9]],
        [[2, 3], [10, 11]],
        [[4, 5], [12, 13]],
        [[6, 7], [14, 15]],
    ]


def test_uneven_first_and_last():
    split = split_layers(
        14, 4, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=4
    )
    assert split == (2, 4, 4, 4)
    assert split_layers(10, 4, num_layers_in_first_pipeline_stage=1) == (1, 3, 3, 3)
    assert split_layers(10, 4, num_layers_in_last_pipeline_stage=4) == (2, 2, 2, 4)
    assert split_layers(5, 2, num_layers_in_last_pipeline_stage=2) == (3, 2)


def test_uneven_virtual():
    # A pipeline of 2 with 2 chunks a rank: rank 0 holds 2 layers, rank 1 holds 4, in turn.
    split = split_layers(6, 2, 2, num_layers_in_first_pipeline_stage=2)
    assert layers_by_rank(split, 2, 2) == [[[0], [3]], [[1, 2], [4, 5]]]


def test_account_for_embedding_and_loss():
    both = {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }
    assert split_layers(30, 4, **both) == (7, 8, 8, 7)
    assert split_layers(14, 4, 2, **both) == (1, 2, 2, 2, 2, 2, 2, 1)
    assert split_layers(7, 4, account_for_embedding_in_pipeline_split=True) == (1, 2, 2, 2)
    assert split_layers(3, 2, account_for_loss_in_pipeline_split=True) == (2, 1)


def test_every_layer_once_or_refused():
    accepted = 0
    options = itertools.product(
        range(1, 25),
        (1, 2, 3, 4),
        (1, 2, 3),
        (None, 1, 2, 4),
        (None, 2, 3),
        (False, True),
        (False, True),
    )
    for layers, pp, v, first, last, embedding, loss in options:
        try:
            split = split_layers(
                layers,
                pp,
                v,
                num_layers_in_first_pipeline_stage=first,
                num_layers_in_last_pipeline_stage=last,
                account_for_embedding_in_pipeline_split=embedding,
                account_for_loss_in_pipeline_split=loss,
            )
        except ConfigError:
            continue
        accepted += 1
        assert [n for stage in range(pp * v) for n in stage_layers(split, stage)] == list(
            range(layers)
        )
        assert len(split) == pp * v
        if first is not None:
            assert sum(split[::pp]) == first
        if last is not None:
            assert sum(split[pp - 1 :: pp]) == last
    assert accepted > 500


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((5, 2), {}, r"num_layers \(5\).*use 4 or 6 layers"),
        ((6, 2, 2), {}, r"\(6\).*number of stages \(4: .*: use 4 or 8 layers"),
        ((4, 1), {"num_layers_in_last_pipeline_stage": 1}, "need pipeline_model_parallel_size > 1"),
        ((4, 2), {"num_layers_in_first_pipeline_stage": 4}, "= 0 must be a positive multiple"),
        (
            (5, 2),
            {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 2},
            "= 1 layers are left",
        ),
        (
            (8, 4),
            {"num_layers_in_first_pipeline_stage": 3},
            r"= 5 must be a positive multiple .* = 3",
        ),
        ((8, 2, 2), {"num_layers_in_first_pipeline_stage": 3}, r"\(3\) must be divisible"),
        ((8, 2), {"num_layers_in_first_pipeline_stage": 0}, "must be at least 1, got 0"),
        (
            (8, 2),
            {"num_layers_in_first_pipeline_stage": 3, "account_for_loss_in_pipeline_split": True},
            "use one or the other",
        ),
        (
            (30, 4),
            {"account_for_loss_in_pipeline_split": True},
            r"\(30 \+ 1 for the loss\).*27 or 31",
        ),
    ],
)
def test_impossible_splits_are_refused(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        split_layers(*arguments, **options)
