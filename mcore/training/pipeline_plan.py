"""From the options to a pipeline: which schedule, where the stages live, which layers they hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore.config.run import RunConfig
from mcore.errors import ConfigError
from mcore.pipeline_parallel import (
    CustomPlans,
    Schedule,
    build_pipeline,
    default_schedule,
    parse_schedule,
)
from mcore.topology.placement import StagePlacement


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The pipeline of a run.

    Attributes:
        schedule: what each rank does.
        placement: where the stages live.
    """

    schedule: Schedule
    placement: StagePlacement

    @property
    def virtual_size(self) -> int | None:
        """Model chunks a rank, None for one."""
        return self.schedule.num_chunks if self.schedule.num_chunks > 1 else None


def plan_pipeline(config: RunConfig) -> PipelinePlan:
    """Choose the schedule; it is proved by `prove_pipeline`.

    Raises:
        ConfigError: options that do not belong together.
        ScheduleError: a file that is no schedule.
    """
    schedule = _schedule(config)
    if schedule.custom is not None and config.training.max_tokens_per_microbatch is not None:
        raise ConfigError(
            f"{config.pipeline.pipeline_schedule} is for one number of microbatches, and with "
            "--max-tokens-per-microbatch every step has its own: use a schedule by name"
        )
    if schedule.splits_backward and config.ddp.sharding_stage >= 2:
        raise ConfigError(
            f"{config.pipeline.pipeline_schedule} has weight gradients (W) after the backward, "
            "where the sharding strategies optim_grads and optim_grads_params do not see them; use "
            "optim or no_shard"
        )
    return PipelinePlan(schedule, schedule.placement(config.model.pipeline_model_parallel_size))


def prove_pipeline(plan: PipelinePlan, counts: Iterable[int]) -> None:
    """Simulate the schedule, before any process group exists.

    A schedule by name is made by a rule, which the tests prove at every size: here it is proved for
    the least and the largest number of micro batches, since a ramp can have hundreds.

    Args:
        plan: the pipeline.
        counts: every number of micro batches that a step or an evaluation may have.

    Raises:
        ConfigError: sizes that the schedule is not defined for.
        ScheduleError: it cannot run; with the rank, the action and the reason.
    """
    wanted, custom = sorted(set(counts)), plan.schedule.custom
    if custom is not None and len(wanted) > 1:
        raise ConfigError(
            f"--pipeline-schedule file:{custom.source} is for {custom.num_microbatches} "
            f"microbatches, and steps and evaluations of this run have {_list(wanted)} (batch "
            "sizes that grow, or that of the evaluation): use a schedule by name"
        )
    for count in dict.fromkeys((wanted[0], wanted[-1])):
        build_pipeline(plan.schedule, plan.placement.num_ranks, count)


def plan_split(config: RunConfig, plan: PipelinePlan) -> tuple[int, ...]:
    """The number of layers of each stage of the chain.

    Raises:
        ConfigError: the layers cannot be split so.
    """
    return config.pipeline.split(config.model, plan.placement, relative_costs(config))


def relative_costs(config: RunConfig) -> tuple[float, float]:
    """Estimated cost of the embedding and of output layer with loss, in layers.

    Floating-point operations of a token's forward: 2 for each weight that multiplies it, and
    2 s n d for the causal half of attention; 5 for each logit's softmax. A looked-up row counts as
    2 operations an element.
    """
    model = config.model
    h, s = model.hidden_size, config.training.seq_length or 0
    attention = (model.num_attention_heads + model.query_groups) * model.head_dim
    weights = 2 * h * attention + h * model.ffn_size * (3 if model.gated_linear_unit else 2)
    layer = 2 * weights + 2 * s * model.num_attention_heads * model.head_dim
    vocabulary = config.tokenizer.vocab_size or 0
    return 2 * h / layer, (2 * h + 5) * vocabulary / layer


def read_schedule(path: str) -> CustomPlans:
    """Read a file of actions, see `parse_schedule`.

    Raises:
        ConfigError: it cannot be read, or is no text.
        ScheduleError: it is no schedule.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"schedule file:{path} cannot be read: {error}") from error
    return parse_schedule(text, path)


def _schedule(config: RunConfig) -> Schedule:
    chunks = config.pipeline.num_chunks(config.model)
    if config.model.pipeline_model_parallel_size > 1:
        return _asked_for(config, chunks)
    # What is asked for has no effect here, and must exist all the same.
    _asked_for(config, 2 if _interleaves(config) else None)
    return default_schedule(1)


def _interleaves(config: RunConfig) -> bool:
    options = config.pipeline
    if options.pipeline_schedule is not None:
        return options.pipeline_schedule == "interleaved-1f1b"
    group = options.microbatch_group_size_per_virtual_pipeline_stage
    return group is not None and options.max_in_flight_microbatches is None


def _asked_for(config: RunConfig, chunks: int | None) -> Schedule:
    options = config.pipeline
    name: Any = options.pipeline_schedule
    if name is not None and name.startswith("file:"):
        custom = read_schedule(name.removeprefix("file:"))
        return Schedule(
            name="custom",
            num_chunks=chunks or custom.num_chunks,
            group=options.microbatch_group_size_per_virtual_pipeline_stage,
            max_in_flight=options.max_in_flight_microbatches,
            custom=custom,
        )
    if name is None:
        name = "1f1b" if (chunks or 1) == 1 else "interleaved-1f1b"
        if options.max_in_flight_microbatches is not None:
            name = "bounded"
    if name == "interleaved-1f1b" and (chunks or 1) == 1:
        raise ConfigError(
            "--pipeline-schedule interleaved-1f1b needs several chunks a rank: give "
            "--num-virtual-stages-per-pipeline-rank 2 or more"
        )
    if name == "custom":
        raise ConfigError("--pipeline-schedule takes your own plans as file:PATH")
    return Schedule(
        name=name,
        num_chunks=2 if name == "zb-v" and chunks is None else chunks or 1,
        group=options.microbatch_group_size_per_virtual_pipeline_stage,
        max_in_flight=options.max_in_flight_microbatches,
    )


def _list(counts: list[int]) -> str:
    shown = ", ".join(map(str, counts[:8]))
    return shown if len(counts) <= 8 else f"{shown} and so on"
