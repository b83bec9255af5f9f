"""One rank's number decides for all ranks."""

import math

import pytest
import torch

from mcore import parallel_state
from mcore.config.stability import StabilityConfig
from mcore.testing import run_distributed
from mcore.training.autopilot.detector import Limits
from mcore.training.autopilot.watch import Watch


def judged(tp, pp, numbers):
    context = parallel_state.initialize_model_parallel(tp, pp)
    watch = Watch(StabilityConfig(loss_spike_policy="rollback"), context, overflows=False)
    watch.limits = Limits(loss=3.0, grad_norm=3.0)
    found = []
    for rank, odd in numbers:
        loss, norm = odd if context.rank == rank else (1.0, 1.0)
        loss, norm = (torch.tensor(x, dtype=torch.float64) for x in (loss, norm))
        vetoed = bool(watch.judge(loss, norm))
        finding = watch.read()
        found.append((vetoed, finding.is_finite, finding.is_spike))
    return found


@pytest.mark.dist
@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (2, 1), (1, 2)])
def test_all_ranks_come_to_the_same_decision(tp, pp):
    numbers = [
        (0, (1.0, 1.0)),
        (1, (3.0, 3.0)),  # at the limits: no spike
        (2, (3.1, 1.0)),
        (3, (1.0, 3.1)),
        (0, (math.nan, 1.0)),
        (1, (1.0, math.inf)),
    ]
    wanted = [
        (False, True, False),
        (False, True, False),
        (True, True, True),
        (True, True, True),
        (True, False, False),
        (True, False, False),
    ]
    assert run_distributed(judged, 4, tp, pp, numbers) == [wanted] * 4
