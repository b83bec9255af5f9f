"""A step never waits for the device: nothing in it reads a tensor on the host."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mcore.device import HostRead
from mcore.training.step import StepFunctions
from tests.equivalence.program import train
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


@pytest.mark.parametrize("flags", ["", pytest.param(OVERFLOWS, marks=pytest.mark.full)])
def test_a_step_reads_nothing_but_the_facts_of_the_step_before(corpus, monkeypatch, flags):
    seen, reads, attempt, wait = [], [], StepFunctions.attempt, HostRead.wait

    def watched(self, *arguments):
        with Methods(seen), Operations(seen):
            return attempt(self, *arguments)

    def waited(self):
        reads.append(self)
        with torch._C.DisableTorchFunction():
            return wait(self)

    monkeypatch.setattr(StepFunctions, "attempt", watched)
    monkeypatch.setattr(HostRead, "wait", waited)
    records = train(command(corpus, 2, flags))
    assert len(records) == 2
    assert seen == []
    assert len(reads) == 2
