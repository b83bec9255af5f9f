"""Runs one rank's program: forwards, backwards and the communication between them.

What is kept of a forward until its backward: the inputs (where gradients arrive) and the nodes of
the autograd graph that made the outputs. The outputs themselves are not kept: once they are sent
their memory is free, unless the graph needs it.

Where a plan puts weight gradients off, the layers that can (`SplitsBackward`) leave their products
in a list during the backward; the W action computes those and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mcore.errors import ScheduleError
from mcore.log import get_logger
from mcore.pipeline_parallel.actions import Action, Kind, split_backwards
from mcore.pipeline_parallel.communication import Batch, Program
from mcore.pipeline_parallel.hooks import ScheduleHooks
from mcore.pipeline_parallel.loss import MicrobatchLoss, describe_returned, read_loss
from mcore.pipeline_parallel.messages import Message, incoming, outgoing
from mcore.pipeline_parallel.p2p_communication import P2PCommunicator, Payload
from mcore.topology.placement import StagePlacement

LossFunc: TypeAlias = Callable[..., Any]
ForwardStepFunc: TypeAlias = Callable[[Any, nn.Module], tuple[Any, LossFunc]]


@runtime_checkable
class TakesInputTensor(Protocol):
    """A model chunk that is not the first: it is given its input before its forward."""

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Take what the stage before returned, in a list; [None] on the first stage."""


@runtime_checkable
class TracksFirstMicrobatch(Protocol):
    """A model chunk that does something once a step, such as caching low-precision weights."""

    def set_is_first_microbatch(self) -> None:
        """The next forward is the first of the step."""


@runtime_checkable
class SplitsBackward(Protocol):
    """A layer that can leave its weight gradients for later."""

    def defer_weight_gradients(self, work: list[Callable[[], None]] | None) -> None:
        """From now on append them to `work`; None = compute them in the backward again."""


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

    inputs: Payload
    roots: tuple[Tensor | GradientEdge | None, ...]


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
        self._split = split_backwards(actions)
        self._splitters = {
            chunk: [m for m in self.chunks[chunk].modules() if isinstance(m, SplitsBackward)]
            for chunk in {chunk for chunk, _ in self._split}
        }
        self._weights: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._held: dict[tuple[int, int], _Held] = {}
        self._mailbox: dict[Message, Payload] = {}
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
                message = incoming(self.placement, self.rank, step)
                with self.hooks.observer.waiting(step):
                    received = self._take(message)
                with self.hooks.observer.running(step):
                    self._act(step, received)
        if self.p2p is not None:
            self.p2p.wait_all()
        assert not self._held
        assert not self._weights
        assert not self._mailbox
        if not self.forward_only:
            self.hooks.finalize_grads(self._num_tokens)
        return ScheduleResult(self._records, self._num_tokens)

    def _act(self, action: Action, received: Payload | None) -> None:
        if action == self._first[action.chunk]:
            self._begin(action.chunk)
        last = self._last[action.chunk]
        # Where a W comes last, no backward leaves a gradient complete: start_grad_sync does it all.
        is_last = action.microbatch == last.microbatch and last.kind is not Kind.WEIGHT
        accumulates = not self.forward_only and not is_last
        with self.hooks.no_sync(action.chunk) if accumulates else nullcontext():
            if action.kind is Kind.FORWARD:
                self._forward(action, received)
            elif action.kind is Kind.BACKWARD:
                self._backward(action, received)
            else:
                self._weight(action)
        if action == last and not self.forward_only:
            self.hooks.start_grad_sync(action.chunk)

    def _begin(self, chunk: int) -> None:
        self.hooks.start_param_sync(chunk)
        if self.marks_first_microbatch:
            for module in _wrapped(self.chunks[chunk]):
                if isinstance(module, TracksFirstMicrobatch):
                    module.set_is_first_microbatch()
                    return

    def _forward(self, action: Action, received: Payload | None) -> None:
        inputs = received or ()
        if not self.forward_only:
            for tensor in inputs:
                if tensor.dtype.is_floating_point:
                    tensor.requires_grad_()
        self._set_input(action.chunk, received)
        with torch.no_grad() if self.forward_only else nullcontext():
            output, loss_func = self._forward_step(action)
            message = outgoing(self.placement, self.rank, action)
            roots = (
                (self._loss(output, loss_func, action),)
                if message is None
                else self._pass_on(message, output, action)
            )
        if not self.forward_only:
            self._held[action.chunk, action.microbatch] = _Held(inputs, roots)

    def _forward_step(self, action: Action) -> tuple[Any, LossFunc]:
        try:
            returned = self.forward_step_func(
                self.data_iterators[action.chunk], self.chunks[action.chunk]
            )
        except StopIteration as error:
            raise ScheduleError(
                f"the data iterator of chunk {action.chunk} on pipeline rank {self.rank} ended at "
                f"microbatch {action.microbatch}; the step reads {self.num_microbatches} of them"
            ) from error
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise ScheduleError(
                "forward_step_func must return (output, loss_func), got "
                f"{describe_returned(returned)}"
            )
        output, loss_func = returned
        return output, loss_func

    def _loss(self, output: Any, loss_func: LossFunc, action: Action) -> Tensor | None:
        """Record the microbatch; what its backward starts from, if anything."""
        if not callable(loss_func):
            raise ScheduleError(
                f"forward_step_func returned {describe_returned(loss_func)} in the place of "
                "loss_func, which the last stage calls with the output"
            )
        if self.collect_non_loss_data:
            self._records.append(loss_func(output, non_loss_data=True))
            return None
        loss = read_loss(loss_func(output), self.num_microbatches)
        self._records.append(loss.record)
        self._count_tokens(loss)
        if self.forward_only:
            return None
        if not loss.value.requires_grad:
            raise self._without_gradient("the loss", action)
        return self.hooks.scale_loss(loss.value)

    def _without_gradient(self, what: str, action: Action) -> ScheduleError:
        return ScheduleError(
            f"{what} of chunk {action.chunk} on pipeline rank {self.rank} (microbatch "
            f"{action.microbatch}) has no gradient, so that nothing before it would train: it was "
            "detached (detach(), item(), no_grad()), or none of it is trained; forward_only=True "
            "measures without a backward"
        )

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

    def _pass_on(
        self, message: Message, output: Any, action: Action
    ) -> tuple[GradientEdge | None, ...]:
        """Put the outputs into the mailbox; for each that has a gradient, the node it goes to."""
        outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        if not outputs or not all(isinstance(tensor, Tensor) for tensor in outputs):
            raise ScheduleError(
                f"the forward step of chunk {action.chunk} on pipeline rank {self.rank} returned "
                f"{type(output).__name__}; a stage that is not the last returns a tensor or a "
                f"list of tensors"
            )
        if not self.forward_only and not any(tensor.requires_grad for tensor in outputs):
            parameters = self.chunks[action.chunk].parameters()
            if any(parameter.requires_grad for parameter in parameters):
                raise self._without_gradient("the output", action)
        self._mailbox[message] = tuple(tensor.detach() for tensor in outputs)
        return tuple(
            get_gradient_edge(tensor) if tensor.requires_grad else None
            for tensor in outputs
            if tensor.dtype.is_floating_point
        )

    def _backward(self, action: Action, gradients: Payload | None) -> None:
        key = (action.chunk, action.microbatch)
        held = self._held.pop(key)
        if key in self._split:
            work = self._weights[key] = []
            with _deferring(self._splitters[action.chunk], work):
                _run_autograd(held, gradients)
        else:
            _run_autograd(held, gradients)
        message = outgoing(self.placement, self.rank, action)
        if message is not None:
            self._mailbox[message] = tuple(
                _take_gradient(tensor) for tensor in held.inputs if tensor.dtype.is_floating_point
            )

    def _weight(self, action: Action) -> None:
        with torch.no_grad():
            for product in self._weights.pop((action.chunk, action.microbatch)):
                product()

    def _post(self, batch: Batch) -> None:
        assert self.p2p is not None
        self.p2p.post(batch, {message: self._mailbox.pop(message) for message in batch.sends})

    def _take(self, message: Message | None) -> Payload | None:
        if message is None:
            return None
        if message.is_local:
            return self._mailbox.pop(message)
        assert self.p2p is not None
        return self.p2p.receive(message)

    def _set_input(self, chunk: int, received: Payload | None) -> None:
        modules = list(_wrapped(self.chunks[chunk]))
        takers = [module for module in modules if isinstance(module, TakesInputTensor)]
        if received is None:
            # A first stage need not have the method, and a wrapper that passes the call on would
            # fail there.
            takers = [module for module in takers if module is modules[-1]]
        if takers:
            takers[-1].set_input_tensor([None] if received is None else list(received))
        elif received is not None:
            raise ScheduleError(
                f"chunk {chunk} of pipeline rank {self.rank} "
                f"({type(self.chunks[chunk]).__name__}) is not the first stage and needs a method "
                f"set_input_tensor([tensor])"
            )


def _run_autograd(held: _Held, gradients: Payload | None) -> None:
    starts = (None,) if gradients is None else gradients  # the loss starts from one
    pairs: list[tuple[Any, Tensor | None]] = [
        (root, start) for root, start in zip(held.roots, starts, strict=True) if root is not None
    ]
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], [start for _, start in pairs])


@contextmanager
def _deferring(layers: Sequence[SplitsBackward], work: list[Callable[[], None]]) -> Iterator[None]:
    """Weight gradients of backwards within go to `work`."""
    for layer in layers:
        layer.defer_weight_gradients(work)
    try:
        yield
    finally:
        for layer in layers:
            layer.defer_weight_gradients(None)


def _take_gradient(tensor: Tensor) -> Tensor:
    """The gradient of an input; a stage that makes no use of it owes the stage before a zero."""
    gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    tensor.grad = None  # the chunk may hold on to its input; its gradient moves on
    return gradient.detach()


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
                "pipeline rank %d failed in %s: %s: %s",
                self._rank,
                self._action.described,
                type(error).__name__,
                error,
            )


def _wrapped(chunk: nn.Module) -> Iterator[nn.Module]:
    """The chunk, then what its wrappers hold under Megatron's and torch's name `module`."""
    module: nn.Module | None = chunk
    while module is not None:
        yield module
        module = dict(module.named_children()).get("module")
