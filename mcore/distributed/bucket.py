"""A run of the flat gradient buffer that is reduced over data-parallel ranks in one collective."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from mcore.topology.collectives import Pending, start_all_reduce_
from mcore.topology.group import Group


class Bucket:
    """Gradients that are reduced together, and how far this step has got with them.

    Args:
        grad_data: its part of the gradient buffer, 1-D.
        params: the parameters whose gradients lie in it.
        position: registration number of its first-registered parameter, whose gradient comes last.
        group: ranks that the gradients are summed over.
    """

    def __init__(
        self, grad_data: Tensor, params: Sequence[nn.Parameter], position: int, group: Group
    ) -> None:
        self.grad_data = grad_data
        self.params = tuple(params)
        self.position = position
        self._group = group
        self._ready: set[int] = set()
        self._pending: Pending | None = None
        self.is_started = False

    @property
    def is_ready(self) -> bool:
        """Whether every gradient is complete."""
        return len(self._ready) == len(self.params)

    def mark_ready(self, param: nn.Parameter) -> None:
        """Note that a parameter's gradient is complete for this step."""
        self._ready.add(id(param))

    def start_reduce(self) -> None:
        """Start the sum over data-parallel ranks.

        Comm: one all-reduce, op sum, over dp-cp, in the buffer's dtype, not normalised.
        """
        assert not self.is_started
        self.is_started = True
        self._pending = start_all_reduce_(self.grad_data, self._group)

    def wait(self) -> None:
        """Wait for the sum; on CUDA the current stream waits, not the host."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def reset(self) -> None:
        """Get ready for the next step; a reduction under way (of an abandoned step) ends first."""
        self.wait()
        self._ready.clear()
        self.is_started = False
