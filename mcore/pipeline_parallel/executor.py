"""Runs one rank's program: forwards, backwards and the communication between them.

What is kept of a forward until its backward: the input (where the gradient arrives) and the node of
the autograd graph that made the output. The output itself is not kept: once it is sent its memory
is free, unless the graph needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mcore.errors import ScheduleError
from mcore.log import get_logger
from mcore.pipeline_parallel.actions import Action, Kind
from mcore.pipeline_parallel.communication import Batch, Program
from mcore.pipeline_parallel.hooks import ScheduleHooks
from mcore.pipeline_parallel.loss import MicrobatchLoss, read_loss
from mcore.pipeline_parallel.messages import Message, incoming, outgoing
from mcore.pipeline_parallel.p2p_communication import P2PCommunicator
from mcore.topology.placement import StagePlacement

LossFunc: TypeAlias = Callable[..., Any]
ForwardStepFunc: TypeAlias = Callable[[Any, nn.Module], tuple[Any, LossFunc]]


@runtime_checkable
class TakesInputTensor(Protocol):
    """A model chunk that is not the first: it is given its input before its forward."""

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Take the one input of the next forward, in a list; [None] on the first stage."""


@runtime_checkable
class TracksFirstMicrobatch(Protocol):
    """A model chunk that does something once a step, such as caching low-precision weights."""

    def set_is_first_microbatch(self) -> None:
        """The next forward is the first of the step."""


class ScheduleResult(NamedTuple):
    """What a step leaves behind.

    Attributes:
        records: one entry a microbatch on the rank with the loss, empty elsewhere (Megatron's
            forward_data_store).
        num_tokens: float64 scalar, see `ScheduleHooks.finalize_grads`.
    """

    records: list[Any]
    num_tokens: Tensor


class _Held(NamedTuple):
    """What a backward needs of its forward."""

    input: Tensor | None
    root: Tensor | GradientEdge | None


@dataclass(kw_only=True)
class PipelineExecutor:
    """One step on one pipeline rank.

    Attributes:
        rank: this rank in the pipeline.
        placement: where the stages live.
        program: this rank's actions and batches.
        chunks: this rank's model chunks.
        data_iterators: one a chunk, passed to the forward step as it is.
        forward_step_func: `(data_iterator, chunk) -> (output, loss_func)`.
        num_microbatches: m.
        p2p: None where the pipeline has one rank.
        device: where the token count lives.
        hooks: called at the turning points.
        forward_only: evaluation: no graph is built.
        collect_non_loss_data: record `loss_func(output, non_loss_data=True)` and compute no loss.
        marks_first_microbatch: call `set_is_first_microbatch` on chunks that have it.
    """

    rank: int
    placement: StagePlacement
    program: Program
    chunks: Sequence[nn.Module]
    data_iterators: Sequence[Iterator[Any] | None]
    forward_step_func: ForwardStepFunc
    num_microbatches: int
    p2p: P2PCommunicator | None
    device: torch.device
    hooks: ScheduleHooks = field(default_factory=ScheduleHooks)
    forward_only: bool = False
    collect_non_loss_data: bool = False
    marks_first_microbatch: bool = True

    def __post_init__(self) -> None:
        actions = [step for step in self.program if isinstance(step, Action)]
        self._first = {action.chunk: action for action in reversed(actions)}
        self._last = {action.chunk: action for action in actions}
        self._held: dict[tuple[int, int], _Held] = {}
        self._mailbox: dict[Message, Tensor] = {}
        self._records: list[Any] = []
        self._has_mean_loss = False
        self._num_tokens = torch.zeros((), dtype=torch.float64, device=self.device)

    def run(self) -> ScheduleResult:
        """Run the whole step; the last thing it does is `hooks.finalize_grads`.

        Raises:
            ScheduleError: the forward step returned something that has no meaning here.
            ShapeError: an output does not have the shape that travels between stages.
        """
        for step in self.program:
            if isinstance(step, Batch):
                self._post(step)
                continue
            with _Naming(self.rank, step):
                self._act(step)
        if self.p2p is not None:
            self.p2p.wait_all()
        assert not self._held
        assert not self._mailbox
        if not self.forward_only:
            self.hooks.finalize_grads(self._num_tokens)
        return ScheduleResult(self._records, self._num_tokens)

    def _act(self, action: Action) -> None:
        if action == self._first[action.chunk]:
            self._begin(action.chunk)
        last = self._last[action.chunk]
        accumulates = not self.forward_only and action.microbatch != last.microbatch
        with self.hooks.no_sync(action.chunk) if accumulates else nullcontext():
            if action.kind is Kind.FORWARD:
                self._forward(action)
            else:
                self._backward(action)
        if action == last and not self.forward_only:
            self.hooks.start_grad_sync(action.chunk)

    def _begin(self, chunk: int) -> None:
        self.hooks.start_param_sync(chunk)
        if self.marks_first_microbatch:
            for module in _wrapped(self.chunks[chunk]):
                if isinstance(module, TracksFirstMicrobatch):
                    module.set_is_first_microbatch()
                    return

    def _forward(self, action: Action) -> None:
        received = self._take(incoming(self.placement, self.rank, action))
        if received is not None and not self.forward_only:
            received.requires_grad_()
        self._set_input(action.chunk, received)
        with torch.no_grad() if self.forward_only else nullcontext():
            output, loss_func = self.forward_step_func(
                self.data_iterators[action.chunk], self.chunks[action.chunk]
            )
            message = outgoing(self.placement, self.rank, action)
            root = (
                self._loss(output, loss_func)
                if message is None
                else self._pass_on(message, output, action)
            )
        if not self.forward_only:
            self._held[action.chunk, action.microbatch] = _Held(received, root)

    def _loss(self, output: Any, loss_func: LossFunc) -> Tensor | None:
        """Record the microbatch; what its backward starts from, if anything."""
        if self.collect_non_loss_data:
            self._records.append(loss_func(output, non_loss_data=True))
            return None
        loss = read_loss(loss_func(output), self.num_microbatches)
        self._records.append(loss.record)
        self._count_tokens(loss)
        return self.hooks.scale_loss(loss.value) if loss.value.requires_grad else None

    def _count_tokens(self, loss: MicrobatchLoss) -> None:
        is_mean = loss.num_tokens is None
        if len(self._records) > 1 and is_mean != self._has_mean_loss:
            raise ScheduleError(
                "loss_func returned a mean for one microbatch and a sum with its tokens for another"
            )
        self._has_mean_loss = is_mean
        if loss.num_tokens is None:
            self._num_tokens = torch.ones_like(self._num_tokens)
        else:
            self._num_tokens = self._num_tokens + loss.num_tokens

    def _pass_on(self, message: Message, output: Any, action: Action) -> GradientEdge | None:
        """Put the output into the mailbox; the node that its gradient goes to, if there is one."""
        if not isinstance(output, Tensor):
            raise ScheduleError(
                f"the forward step of chunk {action.chunk} on pipeline rank {self.rank} returned "
                f"{type(output).__name__}; a stage that is not the last returns one tensor"
            )
        self._mailbox[message] = output.detach()
        return get_gradient_edge(output) if output.requires_grad else None

    def _backward(self, action: Action) -> None:
        held = self._held.pop((action.chunk, action.microbatch))
        gradient = self._take(incoming(self.placement, self.rank, action))
        if isinstance(held.root, GradientEdge):
            assert gradient is not None
            torch.autograd.backward([held.root], [gradient])
        elif held.root is not None:
            torch.autograd.backward([held.root])
        message = outgoing(self.placement, self.rank, action)
        if message is None:
            return
        assert held.input is not None
        # A stage that makes no use of its input owes the stage before a zero all the same.
        answer = torch.zeros_like(held.input) if held.input.grad is None else held.input.grad
        held.input.grad = None  # the chunk may hold on to its input; its gradient moves on
        self._mailbox[message] = answer.detach()

    def _post(self, batch: Batch) -> None:
        assert self.p2p is not None
        self.p2p.post(batch, {message: self._mailbox.pop(message) for message in batch.sends})

    def _take(self, message: Message | None) -> Tensor | None:
        if message is None:
            return None
        if message.is_local:
            return self._mailbox.pop(message)
        assert self.p2p is not None
        return self.p2p.receive(message)

    def _set_input(self, chunk: int, received: Tensor | None) -> None:
        modules = list(_wrapped(self.chunks[chunk]))
        takers = [module for module in modules if isinstance(module, TakesInputTensor)]
        if received is None:
            # A first stage need not have the method, and a wrapper that passes the call on would
            # fail there.
            takers = [module for module in takers if module is modules[-1]]
        if takers:
            takers[-1].set_input_tensor([received])
        elif received is not None:
            raise ScheduleError(
                f"chunk {chunk} of pipeline rank {self.rank} "
                f"({type(self.chunks[chunk]).__name__}) is not the first stage and needs a method "
                f"set_input_tensor([tensor])"
            )


class _Naming(AbstractContextManager[None]):
    """Says in the log which action of which rank failed; the error itself goes on unchanged."""

    def __init__(self, rank: int, action: Action) -> None:
        self._rank = rank
        self._action = action

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            get_logger().error(
                "pipeline rank %d failed in %s (chunk %d, microbatch %d): %s: %s",
                self._rank,
                self._action,
                self._action.chunk,
                self._action.microbatch,
                type(error).__name__,
                error,
            )


def _wrapped(chunk: nn.Module) -> Iterator[nn.Module]:
    """The chunk, then what its wrappers hold under Megatron's and torch's name `module`."""
    module: nn.Module | None = chunk
    while module is not None:
        yield module
        module = dict(module.named_children()).get("module")
