"""Finished gradients as update rules read them: in the precision of what is updated.

A gradient in lower precision (`--main-grads-dtype bf16`) is widened when a rule asks for it, a
piece at a time, so that fp32 gradients of all parameters never exist together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Elements of a piece: 32 MB in fp32.
PIECE_ELEMENTS = 8 * 2**20


def at_once(numel: int) -> int:
    """How many of so many elements are worked on at a time."""
    return min(numel, PIECE_ELEMENTS)


def runs_of(tensor: Tensor) -> Iterator[slice | None]:
    """Runs of elements that make up a tensor; None = all of it.

    A tensor that does not lie in one run of memory is not taken apart.
    """
    if tensor.numel() <= PIECE_ELEMENTS or not tensor.is_contiguous():
        yield None
        return
    for start in range(0, tensor.numel(), PIECE_ELEMENTS):
        yield slice(start, min(start + PIECE_ELEMENTS, tensor.numel()))


def elements(tensor: Tensor, run: slice | None) -> Tensor:
    """A run of a tensor, 1-D and the same memory, or all of it."""
    return tensor if run is None else tensor.view(-1)[run]


class Gradients:
    """Gradients of what an optimizer updates, finished but for a factor."""

    def __init__(self) -> None:
        self._grads: dict[Tensor, Tensor] = {}
        self._factor: Tensor | None = None

    def add(self, main: Tensor, grad: Tensor) -> None:
        """Put in the gradient of a parameter, of its shape and any float dtype."""
        self._grads[main] = grad

    def __contains__(self, main: Tensor) -> bool:
        """Whether a parameter has a gradient."""
        return main in self._grads

    def is_narrow(self, main: Tensor) -> bool:
        """Whether a parameter's gradient has another precision than itself."""
        return self._grads[main].dtype != main.dtype

    def scale_(self, factor: Tensor) -> None:
        """Multiply all gradients by a 0-dim factor, once: in place where they are wide already."""
        assert self._factor is None
        self._factor = factor
        wide = [grad for main, grad in self._grads.items() if not self.is_narrow(main)]
        if wide:
            torch._foreach_mul_(wide, factor)

    def of(self, main: Tensor, run: slice | None = None) -> Tensor:
        """A parameter's gradient in its precision, or a run of it: the memory itself or a copy."""
        grad = self._grads[main]
        grad = grad if run is None else grad.reshape(-1)[run]
        if not self.is_narrow(main):
            return grad
        wide = grad.to(main.dtype)
        return wide if self._factor is None else wide.mul_(self._factor)
