"""Point-to-point communication of a pipeline: posts batches, and waits for what is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mcore.errors import LostPeerError, ShapeError
from mcore.pipeline_parallel.actions import Kind
from mcore.pipeline_parallel.communication import SENDS_UNDER_WAY, Batch
from mcore.pipeline_parallel.messages import Message
from mcore.topology.group import Group

Payload: TypeAlias = tuple[Tensor, ...]


class TensorSpec(NamedTuple):
    """What one of the tensors between two stages looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


# A header says how many tensors follow, and of each its dtype, its dimensions and their sizes.
_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_MAX_TENSORS, _MAX_DIMS = 7, 7
_TENSOR_LENGTH = 2 + _MAX_DIMS
_HEADER_LENGTH = 1 + _MAX_TENSORS * _TENSOR_LENGTH


class _Started(NamedTuple):
    """Operations under way, and of which message each is."""

    works: list[dist.Work]
    messages: list[Message]


@dataclass(slots=True)
class _Posted:
    """A batch on its way; it keeps the tensors that are being sent alive."""

    batch: Batch
    started: _Started
    sends: tuple[Payload, ...]
    receives: dict[Message, Payload]


class P2PCommunicator:
    """Sends and receives tensors between the ranks of a pipeline.

    Batches end in the order in which they were posted: `receive` waits for the batch that brings
    the tensors and for all before it, on every backend. On NCCL that is what the communicator's
    stream does, and waiting costs the host nothing. `communication.py` derives the batches so that
    this never deadlocks. Sent tensors are held until their batch has ended; `post` waits for the
    oldest where too many that bring nothing are under way (`SENDS_UNDER_WAY`), which gloo cannot be
    asked about otherwise.

    With specs every message is those tensors (a gradient: those of a floating dtype). Without, each
    batch first exchanges headers that say what comes, and `post` waits for them: by the order of
    slots that cannot deadlock either, but it costs a round trip and, on CUDA, a synchronisation.

    Where torch creates communicators at their first use (NCCL without a bound device), the first
    batch of the group creates one, and every rank of the pipeline comes to its first batch without
    having to wait for another.
    """

    def __init__(
        self, group: Group, specs: Sequence[TensorSpec] | None, device: torch.device
    ) -> None:
        """Prepare; nothing is communicated.

        Args:
            group: the pipeline group; messages name ranks by their position in it.
            specs: the tensors of each message, such as one of [s/(c t), b, h] for a transformer;
                None = they vary.
            device: where received tensors are put.
        """
        self._group = group
        self._specs = None if specs is None else tuple(specs)
        self._device = device
        self._posted: deque[_Posted] = deque()
        self._received: dict[Message, Payload] = {}

    def post(self, batch: Batch, outgoing: Mapping[Message, Payload]) -> None:
        """Start the sends and receives of a batch; waits for headers and older sends only.

        Args:
            batch: what to send to and receive from which rank.
            outgoing: the tensors of each send; not modified, and held until they are sent.

        Raises:
            ShapeError: a tensor to be sent has another shape or dtype than was announced, which
                the receiver could not know.
            LostPeerError: a peer is gone.
        """
        while len(self._posted) >= SENDS_UNDER_WAY and not self._posted[0].batch.receives:
            self._wait_oldest()
        sends = tuple(
            tuple(tensor.contiguous() for tensor in outgoing[message]) for message in batch.sends
        )
        if self._specs is None:
            arriving = self._exchange_headers(batch, sends)
        else:
            for message, payload in zip(batch.sends, sends, strict=True):
                self._check(message, payload)
            arriving = {message: self._expected(message) for message in batch.receives}
        receives = {
            message: tuple(
                torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs
            )
            for message, specs in arriving.items()
        }
        started = self._start(batch, sends, tuple(receives.values()))
        self._posted.append(_Posted(batch, started, sends, receives))

    def receive(self, message: Message) -> Payload:
        """The tensors of a message whose receive was posted.

        Comm: on gloo the host waits until they are there, on CUDA the current stream.

        Raises:
            LostPeerError: a peer is gone, or silent for longer than the group's timeout.
        """
        while message not in self._received:
            assert self._posted, f"the receive of {message} was not posted"
            self._wait_oldest()
        return self._received.pop(message)

    def wait_all(self) -> None:
        """Wait for all that was posted, sends too."""
        while self._posted:
            self._wait_oldest()
        assert not self._received, "a message was received and never used"

    def _wait_oldest(self) -> None:
        posted = self._posted.popleft()
        self._wait(posted.started)
        self._received.update(posted.receives)

    def _start(
        self, batch: Batch, sends: Sequence[Payload], receives: Sequence[Payload]
    ) -> _Started:
        operations: list[dist.P2POp] = []
        messages: list[Message] = []
        pairs = zip((*batch.sends, *batch.receives), (*sends, *receives), strict=True)
        for message, payload in pairs:
            function = dist.isend if self._is_sent(message) else dist.irecv
            peer = self._group.ranks[self._peer(message)]
            for tensor in payload:
                operations.append(dist.P2POp(function, tensor, peer, self._group.handle))
                messages.append(message)
        if not operations:
            return _Started([], [])
        try:
            return _Started(dist.batch_isend_irecv(operations), messages)
        except RuntimeError as error:
            raise self._lost(messages, error) from error

    def _wait(self, started: _Started) -> None:
        for number, work in enumerate(started.works):
            try:
                work.wait()
            except RuntimeError as error:
                # One work a tensor on gloo, one for the whole batch on NCCL.
                knows = len(started.works) == len(started.messages)
                lost = started.messages[number : number + 1] if knows else started.messages
                raise self._lost(lost, error) from error

    def _is_sent(self, message: Message) -> bool:
        return message.source == self._group.rank

    def _peer(self, message: Message) -> int:
        return message.destination if self._is_sent(message) else message.source

    def _lost(self, messages: Sequence[Message], error: RuntimeError) -> LostPeerError:
        """A peer died or stands still: say which, and what it was to do."""
        owed = []
        for message in dict.fromkeys(messages):
            peer = self._peer(message)
            who = f"pipeline rank {peer} (global rank {self._group.ranks[peer]})"
            what = message.producer.described
            sent = self._is_sent(message)
            owed.append(f"the receipt of {what} by {who}" if sent else f"{what} from {who}")
        return LostPeerError(
            f"pipeline rank {self._group.rank} (global rank {self._group.global_rank}) has lost a "
            f"peer while it waited for {' or '.join(owed)}: that process died or stands still "
            f"({_first_sentence(error)})"
        )

    def _expected(self, message: Message) -> tuple[TensorSpec, ...]:
        assert self._specs is not None
        if message.producer.kind is Kind.FORWARD:
            return self._specs
        return tuple(spec for spec in self._specs if spec.dtype.is_floating_point)

    def _check(self, message: Message, payload: Payload) -> None:
        found = [TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in payload]
        expected = list(self._expected(message))
        if found != expected:
            raise ShapeError(
                f"{message.producer} on pipeline rank {message.source} gave {_describe(found)}; "
                f"between stages travels {_describe(expected)}: pass tensor_shape= and dtype= to "
                f"the schedule, let the stage return that, or let shapes vary "
                f"(config.variable_seq_lengths)"
            )

    def _exchange_headers(
        self, batch: Batch, sends: Sequence[Payload]
    ) -> dict[Message, tuple[TensorSpec, ...]]:
        written = [(_write_header(payload).to(self._device),) for payload in sends]
        empty = [
            (torch.zeros(_HEADER_LENGTH, dtype=torch.int64, device=self._device),)
            for _ in batch.receives
        ]
        self._wait(self._start(batch, written, empty))
        return {
            message: _read_header(header)
            for message, (header,) in zip(batch.receives, empty, strict=True)
        }


def _write_header(payload: Payload) -> Tensor:
    """[_HEADER_LENGTH] int64."""
    if len(payload) > _MAX_TENSORS or any(tensor.dim() > _MAX_DIMS for tensor in payload):
        raise ShapeError(
            f"a stage returned {len(payload)} tensors; at most {_MAX_TENSORS} of at most "
            f"{_MAX_DIMS} dimensions can travel"
        )
    numbers = [len(payload)]
    for tensor in payload:
        if tensor.dtype not in _DTYPES:
            raise ShapeError(f"a stage returned a tensor of {tensor.dtype}, which cannot travel")
        sizes = [*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())]
        numbers += [_DTYPES.index(tensor.dtype), tensor.dim(), *sizes]
    return torch.tensor(numbers + [0] * (_HEADER_LENGTH - len(numbers)))


def _read_header(header: Tensor) -> tuple[TensorSpec, ...]:
    count, *numbers = header.tolist()
    tensors = [numbers[i * _TENSOR_LENGTH : (i + 1) * _TENSOR_LENGTH] for i in range(count)]
    return tuple(TensorSpec(tuple(sizes[:dims]), _DTYPES[dtype]) for dtype, dims, *sizes in tensors)


def _describe(specs: Sequence[TensorSpec]) -> str:
    listed = (f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}" for spec in specs)
    return f"{'a tensor' if len(specs) == 1 else f'{len(specs)} tensors'}: {', '.join(listed)}"


def _first_sentence(error: Exception) -> str:
    return str(error).split("\n", 1)[0].split(". ", 1)[0]
