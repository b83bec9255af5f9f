"""Rows of mcore: a schedule, its measured costs, and the step time that the simulator predicts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean, median

import torch
from stages import MakeLinear, Stage, Work, loss_of
from torch import Tensor, nn

from mcore import parallel_state
from mcore.pipeline_parallel import (
    Costs,
    Kind,
    Schedule,
    ScheduleHooks,
    build_pipeline,
    get_forward_backward_func,
    simulate,
)
from mcore.pipeline_parallel.actions import Action
from mcore.tensor_parallel import ColumnParallelLinear
from mcore.topology.collectives import all_gather_object
from mcore.topology.process_groups import build_context
from mcore.topology.rank_layout import RankLayout

SCHEDULES = {
    "gpipe": Schedule(name="gpipe"),
    "1f1b": Schedule(name="1f1b"),
    "interleaved-1f1b": Schedule(name="interleaved-1f1b", num_chunks=2),
    "zb-h1": Schedule(name="zb-h1"),
    "zb-v": Schedule(name="zb-v", num_chunks=2),
}


class Linear(ColumnParallelLinear):
    """mcore's linear layer, which splits its backward, called as torch's."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Timer:
    """An observer that notes how long each action took."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)

    @contextmanager
    def waiting(self, action: Action) -> Iterator[None]:
        del action
        yield

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[action.kind, action.chunk].append(time.perf_counter() - start)


class Row:
    """One schedule over this rank's chunks.

    Args:
        name: of the schedule.
        work: shape of a step.
        rank: of the pipeline.
        world: ranks.
        own_layers: mcore's linear layers, which a schedule that splits the backward needs.
    """

    def __init__(self, name: str, work: Work, rank: int, world: int, *, own_layers: bool) -> None:
        self.schedule, self.work, self.world = SCHEDULES[name], work, world
        chunks, placement = self.schedule.num_chunks, self.schedule.placement(world)
        self.context = build_context(
            RankLayout(pp=world),
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            stage_placement=placement,
        )
        self.timer = Timer()
        own_layers = own_layers or self.schedule.splits_backward
        linear: MakeLinear = Linear if own_layers else nn.Linear
        with parallel_state.use_context(self.context):
            self.chunks = [
                Stage(work, work.blocks // chunks, placement.stage(rank, chunk), linear)
                for chunk in range(chunks)
            ]
        self.params = [param for chunk in self.chunks for param in chunk.parameters()]
        self.input = torch.randn(work.shape, generator=torch.Generator().manual_seed(5))
        self.run = get_forward_backward_func(schedule=self.schedule)

    def step(self) -> None:
        """Forward and backward of all microbatches."""
        for param in self.params:
            param.grad = None
        iterators = [iter([self.input] * self.work.microbatches) for _ in self.chunks]
        with parallel_state.use_context(self.context):
            self.run(
                forward_step_func=lambda data, chunk: (
                    chunk(next(data)),
                    lambda output: (loss_of(output), {}),
                ),
                data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=self.work.microbatches,
                seq_length=self.work.seq,
                micro_batch_size=self.work.micro_batch,
                tensor_shape=self.work.shape,
                dtype=torch.float32,
                hooks=ScheduleHooks(observer=self.timer),
            )

    def start_measuring(self) -> None:
        """Forget the steps so far."""
        self.timer.seconds.clear()

    def predict(self, communication: float) -> tuple[Costs, float]:
        """Unit costs of a chunk, means over ranks of medians, and the simulated step time."""
        own = {key: median(times) for key, times in self.timer.seconds.items()}
        everyone = all_gather_object(own, self.context.pp)

        def cost(kind: Kind) -> float:
            times = [t for rank in everyone for (k, _), t in rank.items() if k is kind]
            return mean(times) if times else 0.0

        costs = Costs(
            forward=cost(Kind.FORWARD),
            backward=cost(Kind.BACKWARD),
            weight=cost(Kind.WEIGHT),
            communication=communication,
        )
        pipeline = build_pipeline(self.schedule, self.world, self.work.microbatches)
        simulation = simulate(pipeline.plans, pipeline.placement, costs, pipeline.programs)
        return costs, simulation.step_time
