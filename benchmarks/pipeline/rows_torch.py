"""Rows of torch.distributed.pipelining: its schedules over the same stages."""

from __future__ import annotations

import torch
from stages import Stage, Work, loss_of
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

#: mcore's name -> torch's class, chunks a rank, whether they are laid out as a V.
SCHEDULES = {
    "gpipe": (ScheduleGPipe, 1, False),
    "1f1b": (Schedule1F1B, 1, False),
    "interleaved-1f1b": (ScheduleInterleaved1F1B, 2, False),
    "zb-h1": (ScheduleInterleavedZeroBubble, 1, False),
    "zb-v": (ScheduleZBVZeroBubble, 2, True),
}


class Row:
    """One schedule over this rank's chunks."""

    def __init__(self, name: str, work: Work, rank: int, world: int) -> None:
        make, chunks, is_v = SCHEDULES[name]
        numbers = [chunk * world + rank for chunk in range(chunks)]
        if is_v:
            numbers = [rank, 2 * world - 1 - rank]
        self.is_first = 0 in numbers
        self.is_last = chunks * world - 1 in numbers
        self.modules = [Stage(work, work.blocks // chunks, n, nn.Linear) for n in numbers]
        stages = [
            PipelineStage(module, number, chunks * world, torch.device("cpu"))
            for module, number in zip(self.modules, numbers, strict=True)
        ]
        single = name in ("gpipe", "1f1b")
        self.schedule = make(stages[0] if single else stages, work.microbatches, loss_fn=loss_of)
        self.params = [param for module in self.modules for param in module.parameters()]
        one = torch.randn(work.shape, generator=torch.Generator().manual_seed(5))
        self.input = torch.cat([one] * work.microbatches)

    def step(self) -> None:
        """Forward and backward of all microbatches."""
        for param in self.params:
            param.grad = None
        inputs = (self.input,) if self.is_first else ()
        options = {"target": self.input, "losses": []} if self.is_last else {}
        self.schedule.step(*inputs, **options)
