"""Options of data-parallel gradient reduction."""

from __future__ import annotations

from dataclasses import dataclass

from mcore.config.fields import flag
from mcore.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedDataParallelConfig:
    """How gradients are accumulated and reduced over data-parallel ranks.

    `grad_reduce_in_fp32` is on by default, where Megatron's class has it off.
    """

    grad_reduce_in_fp32: bool = flag(
        True,
        help="Accumulate and reduce gradients in fp32 at least; off = in the parameters' dtype.",
        hidden=True,
    )
    overlap_grad_reduce: bool = flag(
        False, help="Reduce each bucket of gradients while the backward of earlier layers runs."
    )
    bucket_size: int | None = flag(
        None,
        name="--ddp-bucket-size",
        help="Elements per bucket of overlapped reduction; max(40e6, 1e6 x data-parallel size) by "
        "default. Without overlap there is one bucket.",
    )
    num_buckets: int | None = flag(
        None,
        name="--ddp-num-buckets",
        help="Number of buckets that the parameters of a model chunk fall into, instead of a size.",
    )

    def __post_init__(self) -> None:
        if self.bucket_size is not None and self.num_buckets is not None:
            raise ConfigError("give bucket_size or num_buckets, not both")
        for name, value in (("bucket_size", self.bucket_size), ("num_buckets", self.num_buckets)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
