"""Point-to-point communication of a pipeline: posts batches, and waits for what is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore.errors import ShapeError
from mcore.pipeline_parallel.communication import Batch
from mcore.pipeline_parallel.messages import Message
from mcore.topology.group import Group


@dataclass(slots=True)
class _Posted:
    """A batch on its way; it keeps the tensors that are being sent alive."""

    works: list[dist.Work]
    sends: tuple[Tensor, ...]
    receives: dict[Message, Tensor]


class P2PCommunicator:
    """Sends and receives tensors of one shape between the ranks of a pipeline.

    Batches end in the order in which they were posted: `receive` waits for the batch that brings
    the tensor and for all before it, on every backend. On NCCL that is what the communicator's
    stream does, and waiting costs the host nothing; on gloo it bounds how long sent tensors are
    held. `communication.py` derives the batches so that this never deadlocks.

    Where torch creates communicators at their first use (NCCL without a bound device), the first
    batch of the group creates one, and every rank of the pipeline comes to its first batch without
    having to wait for another.
    """

    def __init__(
        self, group: Group, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Prepare; nothing is communicated.

        Args:
            group: the pipeline group; messages name ranks by their position in it.
            shape: of every tensor that travels, [s/(c t), b, h] for a transformer.
            dtype: of every tensor that travels.
            device: where received tensors are put.
        """
        self._group = group
        self._shape = tuple(shape)
        self._dtype = dtype
        self._device = device
        self._posted: deque[_Posted] = deque()
        self._received: dict[Message, Tensor] = {}

    def post(self, batch: Batch, outgoing: Mapping[Message, Tensor]) -> None:
        """Start the sends and receives of a batch; does not wait.

        Args:
            batch: what to send to and receive from which rank.
            outgoing: a tensor for each send; it is not modified, and held until it is sent.

        Raises:
            ShapeError: a tensor to be sent has another shape or dtype than was announced, which
                the receiver could not know.
        """
        sends = tuple(self._checked(message, outgoing[message]) for message in batch.sends)
        receives = {
            message: torch.empty(self._shape, dtype=self._dtype, device=self._device)
            for message in batch.receives
        }
        operations = [
            self._operation(dist.isend, tensor, message.destination)
            for message, tensor in zip(batch.sends, sends, strict=True)
        ]
        operations += [
            self._operation(dist.irecv, buffer, message.source)
            for message, buffer in receives.items()
        ]
        works = dist.batch_isend_irecv(operations)
        self._posted.append(_Posted(works, sends, receives))

    def receive(self, message: Message) -> Tensor:
        """The tensor of a message whose receive was posted.

        Comm: on gloo the host waits until it is there, on CUDA the current stream.
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
        for work in posted.works:
            work.wait()
        self._received.update(posted.receives)

    def _operation(self, operation: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, self._group.ranks[peer], self._group.handle)

    def _checked(self, message: Message, tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) != self._shape or tensor.dtype != self._dtype:
            raise ShapeError(
                f"{message.producer} on pipeline rank {message.source} gave a tensor of shape "
                f"{list(tensor.shape)} and {tensor.dtype}; between stages travel tensors of shape "
                f"{list(self._shape)} and {self._dtype}: pass tensor_shape= and dtype= to the "
                f"schedule, or let the stage return that"
            )
        return tensor.contiguous()
