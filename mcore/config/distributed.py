"""Options of data-parallel gradient reduction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mcore.config.fields import below, flag, not_one_of, refuse

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]

#: In the order of the ZeRO stages 0 to 3.
STRATEGIES: tuple[ShardingStrategy, ...] = (
    "no_shard",
    "optim",
    "optim_grads",
    "optim_grads_params",
)


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
    main_grads_dtype: Literal["fp32", "bf16"] = flag(
        "fp32",
        help="Dtype of accumulated and reduced gradients; bf16 needs --bf16, fp32 leaves it to "
        "--grad-reduce-in-bf16. ZeRO-3 reduces in it and keeps its shard in fp32.",
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
    data_parallel_sharding_strategy: ShardingStrategy | None = flag(
        None,
        help="What data-parallel ranks share out rather than hold each: nothing (no_shard, the "
        "default), optimizer state (optim, ZeRO-1), gradients too (optim_grads, ZeRO-2), "
        "parameters too (optim_grads_params, ZeRO-3).",
    )
    use_distributed_optimizer: bool = flag(
        False, help="The same as --data-parallel-sharding-strategy optim (ZeRO-1)."
    )
    overlap_param_gather: bool = flag(
        False, help="Collect updated parameters while the next forward runs (ZeRO-1 and 2)."
    )
    num_distributed_optimizer_instances: int = flag(
        1, help="Copies of the sharded state among the data-parallel ranks (hybrid sharding)."
    )
    reshard_every_microbatch: bool = flag(
        False,
        help="Free gathered parameters after every microbatch also in a pipeline, where they stay "
        "for the whole step otherwise (ZeRO-3).",
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from below(
            self, 1, "num_distributed_optimizer_instances", "bucket_size", "num_buckets"
        )
        strategy = self.data_parallel_sharding_strategy
        yield from not_one_of(self.main_grads_dtype, ("fp32", "bf16"), "main_grads_dtype")
        if strategy is not None and strategy not in STRATEGIES:
            yield from not_one_of(strategy, STRATEGIES, "data_parallel_sharding_strategy")
            return
        if self.use_distributed_optimizer and strategy not in (None, "optim"):
            yield (
                "use_distributed_optimizer means data_parallel_sharding_strategy optim (ZeRO 1), "
                f"but {strategy} is asked for as well; drop one of the two"
            )
        if self.sharding_stage == 0:
            for name in ("overlap_param_gather", "reshard_every_microbatch"):
                if getattr(self, name):
                    yield f"{name} needs sharding; add use_distributed_optimizer"
            if self.num_distributed_optimizer_instances > 1:
                yield (
                    "num_distributed_optimizer_instances needs sharding; add "
                    "use_distributed_optimizer"
                )
        if self.bucket_size is not None and self.num_buckets is not None:
            yield "give bucket_size or num_buckets, not both"

    @property
    def keeps_grads_wide(self) -> bool:
        """Whether gradients are accumulated and reduced in fp32 at least."""
        return self.grad_reduce_in_fp32 and self.main_grads_dtype == "fp32"

    @property
    def sharding_stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        if self.use_distributed_optimizer:
            return 1
        return STRATEGIES.index(self.data_parallel_sharding_strategy or "no_shard")
