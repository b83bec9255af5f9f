"""Numbers that options ask for are those of the whole model, at every layout."""

import pytest

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

# Untied, the embedding has a gradient in the rows of tokens that occur only.
WATCH = "--log-num-zeros-in-grad --log-params-norm --untie-embeddings-and-output-weights"


@pytest.fixture(scope="module")
def reference(corpus):
    return train(command(corpus, 3, WATCH), SINGLE)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout(tp=2, dp=2, sp=True), "--zero-stage 1"),
        (Layout(pp=2, dp=2), "--zero-stage 3"),
    ],
    ids=layout_id,
)
def test_zeros_and_norm_do_not_depend_on_the_layout(corpus, reference, layout, flags):
    records = train(command(corpus, 3, WATCH, flags), layout)
    assert largest_relative_difference(records, reference, "params_norm") <= 1e-6
    # A rounding error may make a zero of a tiny number.
    assert min(series(reference, "num_zeros")) > 0
    assert largest_difference(records, reference, "num_zeros") <= 8
