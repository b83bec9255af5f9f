"""Everything about a run: the tree of configurations, and what follows from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from mcore.config.checkpoint import CheckpointConfig
from mcore.config.data import DataConfig
from mcore.config.distributed import DistributedDataParallelConfig
from mcore.config.fields import flag_of
from mcore.config.gpt import GPTConfig
from mcore.config.logging import LoggingConfig
from mcore.config.optimizer import OptimizerConfig, SchedulerConfig
from mcore.config.pipeline import PipelineConfig
from mcore.config.profiling import ProfilingConfig
from mcore.config.stability import StabilityConfig
from mcore.config.tokenizer import TokenizerConfig
from mcore.config.training import EvaluationConfig, RuntimeConfig, TrainingConfig
from mcore.config.transformer import TransformerConfig
from mcore.num_microbatches_calculator import (
    NumMicroBatchesCalculator,
    StepBatchsizeNumMicroBatchesCalculator,
    build_num_microbatches_calculator,
    parse_step_schedule,
)
from mcore.topology.rank_layout import data_parallel_size

#: Fields whose flag has another name than the field; checkpoints store the flag's name.
OPTION_NAMES = {"layernorm_epsilon": "norm_epsilon", "gated_linear_unit": "swiglu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The configuration tree of one run; plain data, read by the training floor only."""

    model: TransformerConfig
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    gpt: GPTConfig = field(default_factory=GPTConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The tree as JSON, by section and field."""
        tree: dict[str, dict[str, Any]] = {}
        for section in dataclasses.fields(self):
            values = dataclasses.asdict(getattr(self, section.name))
            tree[section.name] = {name: _plain(value) for name, value in values.items()}
        return tree

    def fingerprint(self) -> str:
        """Short hash of the whole configuration."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def model_options(self) -> dict[str, Any]:
        """What defines the model, by option name: it travels with every checkpoint."""
        options: dict[str, Any] = {}
        for section in (self.model, self.gpt, self.tokenizer):
            for item in dataclasses.fields(section):
                description = flag_of(item)
                if description is not None and description.model:
                    name = OPTION_NAMES.get(item.name, item.name)
                    options[name] = _plain(getattr(section, item.name))
        options["num_query_groups"] = self.model.query_groups
        options["kv_channels"] = self.model.head_dim
        options["ffn_hidden_size"] = self.model.ffn_size
        options["seq_length"] = self.training.seq_length
        options["max_position_embeddings"] = self.max_positions
        return options

    @property
    def attention_reads_samples(self) -> bool:
        """Attention depends on the samples' documents, and so every stage reads them."""
        rotary = self.gpt.position_embedding_type == "rope"
        packed = self.data.sft or self.data.reset_attention_mask
        return packed or (rotary and self.data.reset_position_ids)

    @property
    def max_positions(self) -> int | None:
        """Positions of the learned table."""
        return self.gpt.max_position_embeddings or self.training.seq_length


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """What follows from a configuration and the size of the world.

    Attributes:
        data_parallel_size: copies of the model.
        micro_batch_size: samples that one copy computes at a time.
        global_batch_size: samples per optimizer step, at the end where the batch grows.
        num_microbatches: micro batches per copy and step, likewise.
        train_iters: optimizer steps of the whole run.
        seq_length: tokens per sample, or per row of a token budget.
        eval_micro_batch_size: samples that one copy evaluates at a time.
        eval_global_batch_size: samples of an evaluated batch.
    """

    data_parallel_size: int
    micro_batch_size: int
    global_batch_size: int
    num_microbatches: int
    train_iters: int
    seq_length: int
    eval_micro_batch_size: int
    eval_global_batch_size: int

    @property
    def eval_num_microbatches(self) -> int:
        """Micro batches per copy of an evaluated batch."""
        return self.eval_global_batch_size // (self.eval_micro_batch_size * self.data_parallel_size)


def resolve(config: RunConfig, world_size: int) -> Resolved:
    """Fill in what the command line leaves open; `config.checks` has seen to it that it fits."""
    model, training = config.model, config.training
    dp = data_parallel_size(
        world_size,
        tp=model.tensor_model_parallel_size,
        pp=model.pipeline_model_parallel_size,
        cp=model.context_parallel_size,
    )
    assert training.micro_batch_size is not None
    assert training.seq_length is not None
    calculator = batch_size_calculator(training, dp)
    global_batch_size = largest_batch(calculator)
    if training.train_iters is not None:
        iters = training.train_iters
    else:
        assert training.train_samples is not None
        iters = _count_iterations(calculator, training.train_samples)
    return Resolved(
        data_parallel_size=dp,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=global_batch_size,
        num_microbatches=global_batch_size // calculator.micro_batch_times_data_parallel_size,
        train_iters=iters,
        seq_length=training.max_tokens_per_microbatch or training.seq_length,
        eval_micro_batch_size=config.evaluation.eval_micro_batch_size or training.micro_batch_size,
        eval_global_batch_size=config.evaluation.eval_global_batch_size or global_batch_size,
    )


def microbatch_counts(config: RunConfig, world_size: int) -> set[int]:
    """How many micro batches a step or an evaluation can have.

    With a token budget it is whatever the conversations need: then only the number that they would
    have with a row each.
    """
    resolved = resolve(config, world_size)
    dp, micro = resolved.data_parallel_size, resolved.micro_batch_size
    sizes = batch_size_calculator(config.training, dp).global_batch_sizes()
    return {size // (micro * dp) for size in sizes} | {resolved.eval_num_microbatches}


def batch_size_calculator(
    training: TrainingConfig, data_parallel_size: int
) -> NumMicroBatchesCalculator:
    """How large the global batch is after any number of consumed samples."""
    micro = training.micro_batch_size
    assert micro is not None
    if training.step_batch_size_schedule is not None:
        assert training.seq_length is not None
        schedule = parse_step_schedule(training.step_batch_size_schedule, training.seq_length)
        return StepBatchsizeNumMicroBatchesCalculator(schedule, micro, data_parallel_size)
    return build_num_microbatches_calculator(
        0,
        training.rampup_batch_size,
        training.global_batch_size or micro * data_parallel_size,
        micro,
        data_parallel_size,
        training.decrease_batch_size_if_needed,
    )


def largest_batch(calculator: NumMicroBatchesCalculator) -> int:
    """Samples of a step at the end of the run, in whole micro batches."""
    largest = calculator.global_batch_size_at(sys.maxsize)
    return largest - largest % calculator.micro_batch_times_data_parallel_size


def _count_iterations(calculator: NumMicroBatchesCalculator, train_samples: int) -> int:
    """Whole global batches in a number of samples."""
    consumed = iterations = 0
    while True:
        calculator.update(consumed)
        size = calculator.get_current_running_global_batch_size()
        if consumed >= calculator.last_change():
            return iterations + max(0, train_samples - consumed) // size
        if consumed + size > train_samples:
            return iterations
        consumed += size
        iterations += 1


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value
