"""What a user's `loss_func` may return, and what the backward starts from.

| returns | meaning | backward starts from | recorded |
|---|---|---|---|
| `(loss, dict)` | mean of the microbatch (Megatron) | loss / num_microbatches | dict |
| `(loss_sum, num_tokens, dict)` | sum and its number of tokens | loss_sum | dict |
| `(loss_sum, num_tokens)` | the same, nothing else to record | loss_sum | (loss_sum, num_tokens) |
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from mcore.errors import ScheduleError


class MicrobatchLoss(NamedTuple):
    """The loss of one microbatch.

    Attributes:
        value: scalar, with its graph; the backward starts here.
        num_tokens: tokens that the sum was taken over; None for a mean.
        record: what the step returns for this microbatch, without a graph.
    """

    value: Tensor
    num_tokens: Tensor | int | float | None
    record: Any


def read_loss(returned: Any, num_microbatches: int) -> MicrobatchLoss:
    """Understand what `loss_func(output)` returned; see the table above.

    Raises:
        ScheduleError: it is none of the three forms, or the loss is no scalar tensor.
    """
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise ScheduleError(
            f"loss_func must return (loss, dict), (loss_sum, num_tokens, dict) or "
            f"(loss_sum, num_tokens), got {describe_returned(returned)}"
        )
    loss = returned[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ScheduleError(
            f"the loss must be a tensor of one element, got {describe_returned(loss)}"
        )
    if len(returned) == 3:
        if not isinstance(returned[1], (Tensor, int, float)):
            raise ScheduleError(
                "the num_tokens of (loss_sum, num_tokens, dict) must be a number or a tensor, got "
                f"{describe_returned(returned[1])}"
            )
        return MicrobatchLoss(loss, returned[1], returned[2])
    if isinstance(returned[1], (Tensor, int, float)):
        return MicrobatchLoss(loss, returned[1], (loss.detach(), returned[1]))
    return MicrobatchLoss(loss / num_microbatches, None, returned[1])


def describe_returned(value: Any) -> str:
    """What a user's function returned, in words."""
    if isinstance(value, tuple):
        return f"({', '.join(map(describe_returned, value))})"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return type(value).__name__
