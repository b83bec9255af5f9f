"""DeepSpeed's batch triangle: global batch = micro batch x accumulation steps x copies."""

from __future__ import annotations

from dataclasses import dataclass

from mcore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """All three corners.

    Attributes:
        train: samples of an optimizer step.
        micro: samples that a copy computes at a time.
        accumulation: micro batches of a copy in a step.
    """

    train: int
    micro: int
    accumulation: int


def solve_batch(
    train: int | None, micro: int | None, accumulation: int | None, copies: int
) -> BatchSizes | None:
    """The corners that are not given from those that are; None where too few are.

    Args:
        train: `train_batch_size`.
        micro: `train_micro_batch_size_per_gpu`.
        accumulation: `gradient_accumulation_steps`.
        copies: data-parallel size.

    Raises:
        ConfigError: the product does not come out; with the equation, and each corner's fit.
    """
    if train is None and micro is None:
        return None
    if micro is None:
        assert train is not None
        micro = max(1, train // copies // (accumulation or 1))
    if accumulation is None:
        accumulation = 1 if train is None else max(1, train // micro // copies)
    if train is None:
        train = micro * accumulation * copies
    if micro * accumulation * copies != train:
        fits = [f"train_batch_size {micro * accumulation * copies}"]
        if train % (accumulation * copies) == 0:
            fits.append(f"train_micro_batch_size_per_gpu {train // (accumulation * copies)}")
        if train % (micro * copies) == 0:
            fits.append(f"gradient_accumulation_steps {train // (micro * copies)}")
        raise ConfigError(
            f"train_batch_size ({train}) must be train_micro_batch_size_per_gpu ({micro}) x "
            f"gradient_accumulation_steps ({accumulation}) x data-parallel size ({copies}) = "
            f"{micro * accumulation * copies}; it fits with {' or '.join(fits)}"
        )
    return BatchSizes(train, micro, accumulation)
