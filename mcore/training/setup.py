"""Build what training needs: model chunks, optimizer, schedule, data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import nn

from mcore.config.run import Resolved, RunConfig
from mcore.data.builder import Datasets
from mcore.data.gpt_dataset import SampleDataset
from mcore.data.split_source import SplitSource, split_source
from mcore.data.stable_blend import StableBlend
from mcore.device import HostRead
from mcore.distributed import (
    DataParallelModule,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
    build_sharding_groups,
)
from mcore.errors import ConfigError
from mcore.log import get_logger, warn_alike
from mcore.optimizer import (
    MegatronOptimizer,
    OptimizerParamScheduler,
    get_megatron_optimizer,
    get_optimizer_param_scheduler,
)
from mcore.optimizer.lr_scheduler import HasParamGroups
from mcore.topology.collectives import all_gather_object
from mcore.topology.context import ParallelContext
from mcore.topology.stages import stage_layers
from mcore.training.initialize import Runtime
from mcore.training.non_finite import Evidence
from mcore.training.pipeline_plan import PipelinePlan, plan_split


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of the model that one chunk is.

    Attributes:
        pre_process: it embeds tokens.
        post_process: it computes the loss.
        layers: global numbers of its layers.
        vp_stage: its number on this rank, or None without virtual stages.
    """

    pre_process: bool
    post_process: bool
    layers: range
    vp_stage: int | None

    @property
    def reads_tokens(self) -> bool:
        """Whether the chunk needs tokens or labels."""
        return self.pre_process or self.post_process


ModelProvider = Callable[[RunConfig, Stage], nn.Module]
DatasetsProvider = Callable[[RunConfig, tuple[int | None, int | None, int | None]], Datasets]


@dataclass(frozen=True, slots=True)
class UnsettledUpdate:
    """An update of which the host does not know yet whether it was made.

    Attributes:
        facts: whether it was made, gradient norm and loss of the step, and whether its gradients
            overflowed at the lowest loss scale.
        samples: what the schedule advances by if it was made.
        evidence: where a number that is not finite came from, or None where nobody asks.
    """

    facts: HostRead
    samples: int
    evidence: Evidence | None = None


@dataclass(slots=True)
class TrainState:
    """What one training step changes, and what a checkpoint holds.

    Attributes:
        chunks: wrapped model chunks of this rank.
        stages: which part of the model each chunk is.
        optimizer: updates the parameters.
        scheduler: learning rate and weight decay.
        iteration: finished optimizer steps.
        consumed_train_samples: samples of the training stream that were used.
        skipped_iterations: iterations without an update: a gradient was not finite, or the update
            was vetoed, or the data was passed over.
        skipped_train_samples: consumed samples of those iterations.
        passed_over_samples: consumed samples that nothing was computed for.
        unsettled: the last update, until `settling.settle` has looked at it.
        data_segments: weights and cursors of a stable blend so far (`StableBlend.restore`).
        autopilot: what the stability autopilot keeps in checkpoints, plain data.
        evaluation_is_owed: the run left before the evaluation that was due at this iteration.
    """

    chunks: list[DataParallelModule]
    stages: list[Stage]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    iteration: int = 0
    consumed_train_samples: int = 0
    skipped_iterations: int = 0
    skipped_train_samples: int = 0
    passed_over_samples: int = 0
    unsettled: UnsettledUpdate | None = None
    data_segments: list[dict[str, Any]] = field(default_factory=list)
    autopilot: dict[str, Any] = field(default_factory=dict)
    evaluation_is_owed: bool = False


def plan_stages(config: RunConfig, ctx: ParallelContext, pipeline: PipelinePlan) -> list[Stage]:
    """Which part of the model each chunk of this rank is."""
    placement, rank = pipeline.placement, ctx.pp.rank
    split = plan_split(config, pipeline)
    get_logger().info("layers of each stage: %s", " ".join(map(str, split)))
    return [
        Stage(
            pre_process=placement.is_first_stage(rank, chunk),
            post_process=placement.is_last_stage(rank, chunk),
            layers=stage_layers(split, placement.stage(rank, chunk)),
            vp_stage=None if pipeline.virtual_size is None else chunk,
        )
        for chunk in range(placement.num_chunks)
    ]


def build_state(
    config: RunConfig, resolved: Resolved, runtime: Runtime, model_provider: ModelProvider
) -> TrainState:
    """Build model, optimizer and schedule of this rank.

    Comm: counting parameters gathers one number per rank.
    """
    stages = plan_stages(config, runtime.ctx, runtime.pipeline)
    chunks = wrap_chunks(
        config, runtime.ctx, [model_provider(config, stage).to(runtime.device) for stage in stages]
    )
    report_parameters(chunks, runtime.ctx)
    optimizer = get_megatron_optimizer(config.optimizer, chunks, context=runtime.ctx)
    return TrainState(chunks, stages, optimizer, build_scheduler(optimizer, config, resolved))


def build_scheduler(
    optimizer: HasParamGroups, config: RunConfig, resolved: Resolved
) -> OptimizerParamScheduler:
    """The schedule of a run, which writes into the groups of `optimizer`.

    Raises:
        ConfigError: options that define no schedule.
    """
    in_samples = config.training.train_iters is None
    return get_optimizer_param_scheduler(
        optimizer,
        config.optimizer,
        config.scheduler,
        global_batch_size=resolved.global_batch_size,
        train_iters=None if in_samples else resolved.train_iters,
        train_samples=config.training.train_samples,
    )


def wrap_chunks(
    config: RunConfig, ctx: ParallelContext, modules: list[nn.Module]
) -> list[DataParallelModule]:
    """Put model chunks into the data-parallel wrapper of the sharding strategy.

    Comm: see the wrappers; hybrid sharding creates communicators.
    """
    options = config.ddp
    wrapper: type[DistributedDataParallel | FullyShardedDataParallel] = DistributedDataParallel
    if options.sharding_stage and ctx.dp_cp.handle is None:
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=options.keeps_grads_wide)
    elif options.sharding_stage == 3:
        wrapper = FullyShardedDataParallel
    groups = build_sharding_groups(
        ctx,
        options.num_distributed_optimizer_instances,
        timeout=timedelta(minutes=config.runtime.distributed_timeout_minutes),
    )
    return [
        wrapper(config.model, options, module, context=ctx, groups=groups) for module in modules
    ]


def report_parameters(chunks: list[DataParallelModule], ctx: ParallelContext) -> int:
    """Count each logical parameter of the model once and say so; padding is not counted."""
    parts = [part for chunk in chunks for part in chunk.held_parts()]
    own = sum(part.sharding.owned_numel(part.run.shape) for part in parts)
    total = sum(all_gather_object(own, ctx.mp))
    held = sum(part.data.numel() for part in parts)
    get_logger().info("model: %s parameters, %s on this rank", f"{total:,}", f"{held:,}")
    return total


def data_sizes(config: RunConfig, resolved: Resolved) -> tuple[int, int | None, int]:
    """Samples needed of each split: (training, validation, test), Megatron's rule.

    None = one pass over the validation data (`--full-validation`).
    """
    options, iters = config.evaluation, config.evaluation.eval_iters
    evaluations = resolved.train_iters // options.eval_interval + 1
    train = config.training.train_samples or resolved.train_iters * resolved.global_batch_size
    batch = resolved.eval_global_batch_size
    valid = None if options.full_validation and iters else evaluations * iters * batch
    return train, valid, iters * batch


def follow_data_order(state: TrainState, train_set: SampleDataset | None) -> None:
    """Let a stable blend go on where the checkpoint's stood, whatever its weights are now.

    Raises:
        ConfigError: the checkpoint is of a run in the stable order and this one is not.
    """
    if isinstance(train_set, StableBlend):
        state.data_segments = train_set.restore(state.data_segments, state.consumed_train_samples)
    elif state.data_segments:
        raise ConfigError(
            "the checkpoint is of a run with --data-order stable; continue it with that option, or "
            "start from its weights with --finetune"
        )


def check_datasets(
    datasets: Datasets, sizes: tuple[int, int | None, int], config: RunConfig
) -> None:
    """Refuse data that would run out or be missing in the middle of the run.

    A validation split that was given no share, or no path, is a choice, of which the log reminds; a
    share in which there is no sequence is a mistake.

    Raises:
        ConfigError: no training data, or less than one evaluation or the training needs; the
            message names the files.
    """
    for number, name in enumerate(("training", "validation", "test")):
        dataset, size = datasets[number], sizes[number]
        source = split_source(config.data, number)
        if dataset is None:
            _answer_missing(number, name, source, config)
        elif size is not None and len(dataset) < size:
            raise ConfigError(
                f"the {name} data ({source.files}) has {len(dataset)} samples, {size} are needed; "
                "train or evaluate for fewer iterations, or add data (several prefixes without "
                "weights are never repeated: give them weights)"
            )


def _answer_missing(number: int, name: str, source: SplitSource, config: RunConfig) -> None:
    is_evaluated = number == 1 and config.evaluation.eval_iters > 0
    if number == 0 or (is_evaluated and source.lack is None):
        why = source.lack or "its share of them holds no sequence"
        raise ConfigError(
            f"the {name} split of {source.files} is empty: {why}; give it a larger share in "
            "--split, or data of its own"
        )
    if is_evaluated:
        warn_alike(
            "nothing will be evaluated, for there is no validation data beside %s: %s",
            source.files,
            source.lack,
        )
