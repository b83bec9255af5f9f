"""A model that is no transformer, cut into stages, and the same model in one piece."""

from __future__ import annotations

import random
import time
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mcore import parallel_state
from mcore.config.parallel import ModelParallelConfig
from mcore.pipeline_parallel import (
    Schedule,
    ScheduleHooks,
    default_schedule,
    get_forward_backward_func,
)
from mcore.tensor_parallel import ColumnParallelLinear
from mcore.topology.group import Group

SEQ, BATCH, HIDDEN, VOCAB = 3, 2, 4, 7
SHAPE = (SEQ, BATCH, HIDDEN)


class Stage(nn.Module):
    """Residual tanh layer; the first stage embeds, the last computes one loss a token.

    The linear map is ours, so that its weight gradient can be put off; the head is torch's.
    """

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.linear = ColumnParallelLinear(
            HIDDEN,
            HIDDEN,
            config=ModelParallelConfig(params_dtype=torch.float64),
            tp_group=Group.single("tp"),
        )
        self.embedding = nn.Embedding(VOCAB, HIDDEN, dtype=torch.float64) if stage == 0 else None
        is_last = stage == num_stages - 1
        self.head = nn.Linear(HIDDEN, 1, dtype=torch.float64) if is_last else None
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.input: Tensor | None = None

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        assert len(input_tensor) == 1
        self.input = input_tensor[0]

    def forward(self, tokens: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(tokens)
        else:
            assert self.input is not None
            x = self.input
        x = x + torch.tanh(self.linear(x)[0])
        return x if self.head is None else self.head(x).squeeze(-1).square()


@dataclass
class Recorder:
    """Hooks that write down what was called."""

    events: list[tuple[Any, ...]] = field(default_factory=list)
    tokens: Tensor | None = None

    def hooks(self, scale: float = 1.0) -> ScheduleHooks:
        return ScheduleHooks(
            no_sync=self._no_sync,
            start_grad_sync=lambda chunk: self.events.append(("grad_sync", chunk)),
            start_param_sync=lambda chunk: self.events.append(("param_sync", chunk)),
            finalize_grads=self._finalize,
            scale_loss=lambda loss: loss * scale,
        )

    def _no_sync(self, chunk: int) -> Recorder._Context:
        return Recorder._Context(self.events, chunk)

    def _finalize(self, num_tokens: Tensor) -> None:
        self.tokens = num_tokens
        self.events.append(("finalize",))

    @dataclass
    class _Context:
        events: list[tuple[Any, ...]]
        chunk: int

        def __enter__(self) -> None:
            self.events.append(("enter", self.chunk))

        def __exit__(self, *_: object) -> None:
            self.events.append(("leave", self.chunk))


def microbatch(index: int) -> tuple[Tensor, Tensor]:
    """Tokens [s, b] and a mask [s, b] with another number of ones for each microbatch."""
    generator = torch.Generator().manual_seed(100 + index)
    tokens = torch.randint(0, VOCAB, (SEQ, BATCH), generator=generator)
    mask = torch.zeros(SEQ * BATCH, dtype=torch.float64)
    mask[: 1 + index % (SEQ * BATCH)] = 1.0
    return tokens, mask.view(SEQ, BATCH)


def sum_loss(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total = (losses * mask).sum()
    return total, mask.sum().long(), {"lm loss": total.detach()}


def pair_loss(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return sum_loss(losses, mask)[:2]


def mean_loss(losses: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    total, count, _ = sum_loss(losses, mask)
    return total / count, {"lm loss": (total / count).detach()}


LOSSES: dict[str, Any] = {"sum": sum_loss, "pair": pair_loss, "mean": mean_loss}


def forward_step_with(form: str, sleep: random.Random | None = None):
    """A forward step as a user of Megatron writes it; with `sleep`, ranks run at uneven speed."""

    def forward_step(iterator, model):
        tokens, mask = next(iterator)
        if sleep is not None:
            time.sleep(sleep.choice((0.0, 0.0, 0.004)))
        return model(tokens), lambda output: LOSSES[form](output, mask)

    return forward_step


def reference(num_stages: int, num_microbatches: int, form: str):
    """Gradients by stage, losses and tokens of one process, by autograd alone."""
    stages = [Stage(stage, num_stages) for stage in range(num_stages)]
    objective = torch.zeros((), dtype=torch.float64)
    losses, count = [], 0
    for index in range(num_microbatches):
        tokens, mask = microbatch(index)
        x = torch.empty(0)
        for stage in stages:
            stage.set_input_tensor([x])
            x = stage(tokens)
        returned = LOSSES[form](x, mask)
        objective = objective + returned[0] / (num_microbatches if form == "mean" else 1)
        losses.append(returned[0].detach())
        count += int(mask.sum())
    objective.backward()
    return [gradients(stage) for stage in stages], losses, count


def gradients(stage: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}


def loss_of(record: Any) -> Tensor:
    return record["lm loss"] if isinstance(record, dict) else record[0]


def run_schedule(pp: int, schedule: Schedule, cases: list[tuple[int, str, bool]]) -> list[Any]:
    """For each (m, loss form, forward_only): this rank's gradients by stage, losses and tokens."""
    v, placement = schedule.num_chunks, schedule.placement(pp)
    ctx = parallel_state.initialize_model_parallel(
        1, pp, v if v > 1 else None, stage_placement=placement
    )
    rank = ctx.pp.rank
    is_default = schedule == default_schedule(pp, v)
    results = []
    for m, form, forward_only in cases:
        chunks = [Stage(placement.stage(rank, chunk), pp * v) for chunk in range(v)]
        recorder = Recorder()
        run = get_forward_backward_func(schedule=None if is_default else schedule)
        records = run(
            forward_step_func=forward_step_with(form, random.Random(rank)),
            data_iterator=[iter([microbatch(i) for i in range(m)]) for _ in range(v)],
            model=chunks,
            num_microbatches=m,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=forward_only,
            hooks=recorder.hooks(),
            tensor_shape=SHAPE,
        )
        grads = {placement.stage(rank, chunk): gradients(chunks[chunk]) for chunk in range(v)}
        tokens = None if recorder.tokens is None else float(recorder.tokens)
        results.append((grads, [loss_of(record) for record in records], tokens))
    return results


class TwoTensors(nn.Module):
    """Sends an activation and the integers that it came from; lengths differ by microbatch."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.inner = Stage(stage, num_stages)
        self.config = SimpleNamespace(variable_seq_lengths=True)
        self.tokens: Tensor | None = None

    def set_input_tensor(self, input_tensor: list[Any]) -> None:
        if input_tensor[0] is not None:
            self.inner.set_input_tensor([input_tensor[0]])
            self.tokens = input_tensor[1]

    def forward(self, tokens: Tensor) -> Any:
        if self.inner.embedding is not None:
            self.tokens = tokens
        assert self.tokens is not None
        assert torch.equal(self.tokens, tokens)
        x = self.inner(tokens)
        return x if self.inner.head is not None else [x, self.tokens]


def cut_microbatch(index: int, fixed: bool) -> tuple[Tensor, Tensor]:
    """A microbatch of its own length, or of full length."""
    tokens, mask = microbatch(index)
    length = SEQ if fixed else 1 + index % SEQ
    return tokens[:length], mask[:length].clone().fill_(1.0)


def run_two_tensors(pp: int, schedule: Schedule, m: int, fixed: bool) -> dict[int, Any]:
    """This rank's gradients by stage, with shapes that are announced or not."""
    v, placement = schedule.num_chunks, schedule.placement(pp)
    ctx = parallel_state.initialize_model_parallel(
        1, pp, v if v > 1 else None, stage_placement=placement
    )
    stages = [placement.stage(ctx.pp.rank, chunk) for chunk in range(v)]
    chunks = [TwoTensors(stage, pp * v) for stage in stages]
    get_forward_backward_func(schedule=schedule)(
        forward_step_func=forward_step_with("sum", random.Random(ctx.pp.rank)),
        data_iterator=[iter([cut_microbatch(i, fixed) for i in range(m)]) for _ in range(v)],
        model=chunks,
        num_microbatches=m,
        seq_length=SEQ,
        micro_batch_size=BATCH,
        tensor_shape=[SHAPE, (SEQ, BATCH)] if fixed else None,
        dtype=[torch.float64, torch.int64] if fixed else None,
    )
    return {stage: gradients(chunk.inner) for stage, chunk in zip(stages, chunks, strict=True)}


def reference_two_tensors(num_stages: int, m: int, fixed: bool) -> list[dict[str, Tensor]]:
    """The same in one process, by autograd alone."""
    stages = [Stage(stage, num_stages) for stage in range(num_stages)]
    for index in range(m):
        tokens, mask = cut_microbatch(index, fixed)
        x: Any = None
        for stage in stages:
            stage.set_input_tensor([x])
            x = stage(tokens)
        sum_loss(x, mask)[0].backward()
    return [gradients(stage) for stage in stages]


def peak_of_saved_tensors(
    pp: int, schedule: Schedule, counts: list[int], forward_only: bool
) -> list[tuple[int, int]]:
    """On one of pp ranks, for each m: the most tensors saved for backward, and outputs kept."""
    ctx = parallel_state.initialize_model_parallel(1, pp)
    return [_peaks(ctx.pp.rank, pp, schedule, m, forward_only) for m in counts]


def _peaks(rank: int, pp: int, schedule: Schedule, m: int, forward_only: bool) -> tuple[int, int]:
    live: weakref.WeakSet[Any] = weakref.WeakSet()
    outputs: list[StorageWeakRef] = []  # the memory: what is sent is another tensor over it
    peaks = [0, 0]

    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        live.add(box)
        peaks[0] = max(peaks[0], len(live))
        return box

    def forward_step(iterator, model):
        peaks[1] = max(peaks[1], sum(not output.expired() for output in outputs))
        tokens, mask = next(iterator)
        output = model(tokens)
        outputs.append(StorageWeakRef(output.untyped_storage()))
        return output, lambda losses: sum_loss(losses, mask)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        get_forward_backward_func(schedule=schedule)(
            forward_step_func=forward_step,
            data_iterator=iter([microbatch(i) for i in range(m)]),
            model=Stage(rank, pp),
            num_microbatches=m,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            tensor_shape=SHAPE,
            forward_only=forward_only,
        )
    assert not live
    return peaks[0], peaks[1]
