"""A step never waits for the device: nothing in it reads a tensor on the host."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mcore.device import HostRead
from mcore.testing import run_distributed
from mcore.training.step import StepFunctions
from tests.equivalence.program import Layout, train_here
from tests.equivalence.tiny import command

#: What asks a tensor for its numbers, from Python, and from within torch's own operations.
METHODS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
OPERATIONS = {"_local_scalar_dense", "nonzero", "equal", "masked_select"}


class Methods(TorchFunctionMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in METHODS:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in OPERATIONS:
            self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


OVERFLOWS = "--fp16 --initial-loss-scale 1e30 --hidden-dropout 0.1 --log-params-norm"


def watch_steps(words):
    """On this rank: what its training steps read, how often they waited, and the iterations."""
    seen, waits, attempt, wait = [], [], StepFunctions.attempt, HostRead.wait

    def watched(self, *arguments):
        with Methods(seen), Operations(seen):
            return attempt(self, *arguments)

    def waited(self):
        waits.append(self)
        with torch._C.DisableTorchFunction():
            return wait(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepFunctions, "attempt", watched)
        patch.setattr(HostRead, "wait", waited)
        iterations = train_here(words, lambda state: state.iteration)
    return seen, len(waits), iterations


@pytest.mark.dist
@pytest.mark.parametrize(
    ("pp", "flags"),
    [
        (1, ""),
        pytest.param(1, OVERFLOWS, marks=pytest.mark.full),
        pytest.param(2, "--pipeline-schedule 1f1b", marks=pytest.mark.full),
        (2, "--pipeline-schedule zb-v"),
    ],
)
def test_a_step_reads_nothing_but_the_facts_of_the_step_before(corpus, pp, flags):
    words = [*command(corpus, 2, flags), *Layout(pp=pp).flags, "--device", "cpu"]
    ranks = [watch_steps(words)] if pp == 1 else run_distributed(watch_steps, pp, words)
    assert ranks == [([], 2, 2)] * pp
