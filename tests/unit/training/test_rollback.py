"""What a run that goes back keeps of the present, where a checkpoint says otherwise."""

from types import SimpleNamespace

import pytest

from mcore.data.stable_blend import StableBlend
from mcore.training import loop


@pytest.fixture
def run(monkeypatch):
    """A run whose checkpoint, at sample 4 of 8, was written with other weights of the blend."""
    corpora = {name: list(range(8)) for name in "ab"}
    blend = StableBlend(corpora, {"a": "1", "b": "2"}, [1.0, 3.0], 8)
    before = StableBlend(corpora, {"a": "1", "b": "2"}, [1.0, 1.0], 8).restore([], 0)
    state = SimpleNamespace(iteration=3, consumed_train_samples=8, evaluation_is_owed=False)
    state.data_segments = blend.restore(before, 4)

    def go_back(state, *_):
        state.iteration, state.consumed_train_samples = 1, 4
        state.data_segments, state.evaluation_is_owed = before, True

    monkeypatch.setattr(loop.checkpointing, "go_back", go_back)
    nothing = SimpleNamespace(
        wait=lambda: None,
        found_damaged=lambda _: None,
        rewind=lambda _: None,
        rolled_back=lambda *_: None,
        ctx=None,
    )
    made = object.__new__(loop.Run)
    made.state, made.datasets, made.restore_from = state, (blend, None, None), "somewhere"
    made.config = made.runtime = made.writer = made.log = made.autopilot = nothing
    return made


def test_a_rollback_keeps_the_present_data_order_and_evaluation(run):
    segments = list(run.state.data_segments)
    assert len(segments) == 2
    run._go_back(SimpleNamespace(iteration=3), [])
    assert run.state.iteration == 1
    assert run.state.data_segments == segments
    assert not run.state.evaluation_is_owed
