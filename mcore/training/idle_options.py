"""Options that a run was given and makes no use of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mcore.config.distributed import DistributedDataParallelConfig
from mcore.config.run import RunConfig
from mcore.config.transformer import TransformerConfig

_RECOMPUTED = next(
    field.default
    for field in dataclasses.fields(TransformerConfig)
    if field.name == "recompute_modules"
)


def idle_options(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Flags without effect beside the others, each with the reason."""
    model = config.model
    if model.sequence_parallel and model.tensor_model_parallel_size == 1:
        yield "--sequence-parallel", "the tensor-parallel size is 1"
    if model.recompute_granularity != "selective" and model.recompute_modules != _RECOMPUTED:
        yield "--recompute-modules", "it needs --recompute-granularity selective"
    if config.checkpoint.load is None:
        for flag, loads in (
            ("--no-load-rng", config.checkpoint.load_rng),
            ("--no-load-optim", config.checkpoint.load_optim),
        ):
            if not loads:
                yield flag, "there is no --load"
    yield from _of_data_parallelism(config.ddp, model.pipeline_model_parallel_size)


def _of_data_parallelism(
    ddp: DistributedDataParallelConfig, pipeline_size: int
) -> Iterator[tuple[str, str]]:
    stage = ddp.sharding_stage
    if ddp.reshard_every_microbatch and 0 < stage < 3:
        yield "--reshard-every-microbatch", f"parameters are not gathered with ZeRO-{stage}"
    if ddp.reshard_every_microbatch and stage == 3 and pipeline_size == 1:
        yield "--reshard-every-microbatch", "that is done anyway where there is no pipeline"
    overlaps = ddp.overlap_grad_reduce or ddp.overlap_param_gather
    reason = None
    if stage == 3:
        reason = "ZeRO-3 gathers and reduces layer by layer, beside the computation"
    elif stage < 2 and not overlaps:
        reason = "there is one bucket without --overlap-grad-reduce"
    given = {
        "--overlap-grad-reduce": stage == 3 and ddp.overlap_grad_reduce,
        "--overlap-param-gather": stage == 3 and ddp.overlap_param_gather,
        "--ddp-bucket-size": ddp.bucket_size is not None,
        "--ddp-num-buckets": ddp.num_buckets is not None,
    }
    if reason is not None:
        yield from ((flag, reason) for flag, is_given in given.items() if is_given)
