"""Options that save memory change no number, at the layouts where they do something."""

import pytest

from tests.equivalence.program import (
    Layout,
    largest_difference,
    largest_relative_difference,
    layout_id,
    train,
)
from tests.equivalence.tiny import command

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        (Layout(tp=2), "uniform"),
        pytest.param(Layout(tp=2, pp=2), "block", marks=pytest.mark.full),
        pytest.param(Layout(tp=4), "uniform", marks=pytest.mark.full),
    ],
    ids=layout_id,
)
def test_distributed_saved_activations(corpus, layout, method):
    """Each rank keeps its part of a layer's input and collects the whole for the backward."""
    words = command(corpus, 4, DROPOUT, f"{FULL} {method}")
    plain = train(words, layout)
    spread = train([*words, "--distribute-saved-activations"], layout)
    assert largest_difference(spread, plain) == 0.0
    assert largest_relative_difference(spread, plain) <= 1e-7


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout(tp=2, pp=2, sp=True), ""),
        pytest.param(Layout(tp=2, sp=True), "", marks=pytest.mark.full),
        pytest.param(Layout(tp=2, pp=2), UNTIED, marks=pytest.mark.full),
        pytest.param(Layout(pp=2, vpp=2), "--label-smoothing 0.1", marks=pytest.mark.full),
        pytest.param(
            Layout(dp=2), "--zero-stage 3 --z-loss-coefficient 0.01", marks=pytest.mark.full
        ),
        pytest.param(Layout(dp=2), f"--zero-stage 2 {UNTIED}", marks=pytest.mark.full),
    ],
    ids=layout_id,
)
def test_the_fused_head_trains_as_the_plain_one(corpus, layout, flags):
    words = command(corpus, 4, flags)
    plain = train(words, layout)
    fused = train([*words, "--cross-entropy-loss-fusion"], layout)
    assert largest_difference(fused, plain) <= 2e-6
    assert largest_relative_difference(fused, plain) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [Layout(tp=2, dp=4, sp=True), Layout(pp=2, dp=4), Layout(pp=2, vpp=2, dp=4)], ids=str
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sharding_with_other_axes_and_overlap(corpus, layout, stage):
    flags = f"--zero-stage {stage} --num-distributed-optimizer-instances 2 --overlap-grad-reduce"
    overlap = "--overlap-param-gather --ddp-bucket-size 1" if stage < 3 else ""
    plain = train(command(corpus, 5), Layout(dp=4))
    hybrid = train(command(corpus, 5, flags, overlap), layout)
    assert largest_difference(hybrid, plain) <= 3e-6
    assert largest_relative_difference(hybrid, plain) <= 1e-5
