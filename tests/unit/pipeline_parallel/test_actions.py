from __future__ import annotations

import pytest

from mcore.errors import ScheduleError
from mcore.pipeline_parallel.actions import Action, Kind, format_plans, parse_action, parse_plans
from mcore.pipeline_parallel.plans import plan_interleaved


def test_text_form():
    action = Action(Kind.FORWARD, chunk=0, microbatch=3)
    assert str(action) == "F0.3"
    assert parse_action(" B2.11 ") == Action(Kind.BACKWARD, 2, 11)


@pytest.mark.parametrize("text", ["", "F", "F0", "F0.", "f0.1", "X0.1", "F0.1x", "F-1.0", "F0 .1"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="is no action"):
        parse_action(text)


def test_plans_survive_their_text_form():
    plans = tuple(plan_interleaved(3, rank, 12, 2) for rank in range(3))
    text = format_plans(plans)
    assert text.splitlines()[2].split()[:4] == ["F0.0", "F0.1", "F0.2", "F1.0"]
    assert parse_plans("# three ranks\n\n" + text) == plans
    assert parse_plans("F0.0, B0.0") == ((Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)),)


def test_a_bad_line_is_named():
    with pytest.raises(ScheduleError, match=r"line 2: 'G0\.0'"):
        parse_plans("F0.0 B0.0\nF0.0 G0.0")
