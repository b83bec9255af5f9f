from __future__ import annotations

import pytest

from mcore.errors import ConfigError
from mcore.pipeline_parallel.actions import Action, Kind, parse_plans
from mcore.pipeline_parallel.messages import incoming, outgoing
from mcore.pipeline_parallel.simulate import simulate
from mcore.topology.placement import Location, StagePlacement


def test_usual_placement_goes_round_the_ranks():
    placement = StagePlacement.usual(4, 2)
    assert [placement.stage(rank, chunk) for chunk in (0, 1) for rank in range(4)] == list(range(8))
    assert placement.is_first_stage(0, 0)
    assert placement.is_last_stage(3, 1)
    assert not placement.is_first_stage(0, 1)
    assert not placement.is_last_stage(3, 0)
    assert placement.next(3, 0) == Location(0, 1)
    assert placement.prev(0, 1) == Location(3, 0)
    assert placement.prev(0, 0) is None
    assert placement.next(3, 1) is None


def test_a_v_placement_needs_no_other_code():
    """First and last stage on rank 0: the chain turns round on rank 1, without a message there."""
    placement = StagePlacement((Location(0, 0), Location(1, 0), Location(1, 1), Location(0, 1)))
    assert placement.is_first_stage(0, 0)
    assert placement.is_last_stage(0, 1)
    turn = outgoing(placement, 1, Action(Kind.FORWARD, 0, 5))
    assert turn == incoming(placement, 1, Action(Kind.FORWARD, 1, 5))
    assert turn is not None
    assert turn.is_local
    plans = parse_plans(
        """
        F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1
        F0.0 F1.0 F0.1 F1.1 B1.0 B0.0 B1.1 B0.1
        """
    )
    assert simulate(plans, placement).peak_in_flight == (3, 4)


@pytest.mark.parametrize("locations", [(), ((0, 0), (0, 0)), ((0, 0), (1, 1)), ((1, 0), (2, 0))])
def test_holes_are_refused(locations):
    with pytest.raises(ConfigError, match="every chunk of every rank once"):
        StagePlacement(tuple(Location(*location) for location in locations))
