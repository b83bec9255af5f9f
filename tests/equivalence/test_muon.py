"""Muon makes the same numbers at every layout, and its state reloads at any other.

In fp64: Newton-Schulz steps enlarge rounding in directions of small singular values, so that fp32
would hide a wrong block of a matrix.
"""

import pytest
import torch

from tests.equivalence.program import (
    SINGLE,
    Layout,
    largest_difference,
    largest_relative_difference,
    layout_id,
    series,
    train,
)
from tests.equivalence.tiny import command

MUON = "--optimizer muon --muon-extra-scale-factor 0.2 --muon-use-nesterov"
#: One key and value head for two ranks: its rows are held twice.
GROUPED = "--swiglu --ffn-hidden-size 44 --group-query-attention --num-query-groups 1"
TOLERANCE = 1e-9


def run(words, layout, **options):
    return train(words, layout, dtype=torch.float64, **options)


@pytest.fixture(scope="module")
def references(corpus):
    return {flags: run(command(corpus, 5, MUON, flags), SINGLE) for flags in ("", GROUPED)}


@pytest.mark.parametrize(
    ("layout", "flags", "model"),
    [
        (Layout(tp=2, sp=True), "", GROUPED),
        (Layout(pp=2, dp=2), "--zero-stage 3", ""),
        (Layout(tp=2, dp=2), "--zero-stage 1 --overlap-param-gather", GROUPED),
        pytest.param(Layout(tp=2), "", "", marks=pytest.mark.full),
        pytest.param(Layout(pp=2), "", "", marks=pytest.mark.full),
        pytest.param(Layout(dp=2), "", "", marks=pytest.mark.full),
        pytest.param(Layout(dp=2), "--zero-stage 1", "", marks=pytest.mark.full),
        pytest.param(Layout(dp=2), "--zero-stage 2", "", marks=pytest.mark.full),
        pytest.param(Layout(dp=2), "--zero-stage 3", GROUPED, marks=pytest.mark.full),
        pytest.param(Layout(pp=2, vpp=2, dp=2), "--zero-stage 2", "", marks=pytest.mark.full),
        pytest.param(
            Layout(dp=4),
            "--zero-stage 1 --num-distributed-optimizer-instances 2",
            "",
            marks=pytest.mark.full,
        ),
    ],
    ids=layout_id,
)
def test_every_layout_makes_the_same_numbers(corpus, references, layout, flags, model):
    records = run(command(corpus, 5, MUON, model, flags), layout)
    assert largest_difference(records, references[model]) <= TOLERANCE
    assert largest_relative_difference(records, references[model]) <= TOLERANCE


def test_queries_keys_and_values_are_matrices_of_their_own(corpus, references):
    records = run(command(corpus, 5, MUON, "--muon-no-split-qkv"), SINGLE)
    assert largest_difference(records, references[""]) > 1e-6


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("--zero-stage 1", Layout(dp=2)), ("", Layout(tp=2))),
        pytest.param(("", Layout(pp=2)), ("--zero-stage 3", Layout(dp=2)), marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_at_another_layout(corpus, tmp_path, references, first, second):
    flags = ["--save-interval 3 --no-load-rng --save", str(tmp_path / "save")]
    path = tmp_path / "records.jsonl"
    run(command(corpus, 5, MUON, first[0], *flags, "--exit-interval 3"), first[1], records=path)
    words = command(corpus, 5, MUON, second[0], *flags, "--load", str(tmp_path / "save"))
    records = run(words, second[1], records=path)
    assert series(records, "iteration") == [1, 2, 3, 4, 5]
    assert largest_difference(records, references[""]) <= TOLERANCE
