"""Rules between configurations. Each is one small function; nothing else checks across them.

A rule returns the problem in words (what, got, wanted, how to fix) or None. All problems of a
command line are reported together, before any process group exists.
"""

from __future__ import annotations

from collections.abc import Callable

from mcore.config.run import RunConfig
from mcore.errors import ConfigError, TopologyError
from mcore.topology.rank_layout import data_parallel_size

Check = Callable[[RunConfig, int], str | None]


def _required(config: RunConfig, world_size: int) -> str | None:
    del world_size
    training = config.training
    missing = [
        flag
        for flag, value in (
            ("--micro-batch-size", training.micro_batch_size),
            ("--seq-length", training.seq_length),
            ("--train-iters (or --train-samples)", training.train_iters or training.train_samples),
            ("--lr", config.optimizer.lr),
        )
        if value is None
    ]
    return f"missing: {', '.join(missing)}" if missing else None


def _world(config: RunConfig, world_size: int) -> str | None:
    model = config.model
    try:
        data_parallel_size(
            world_size,
            tp=model.tensor_model_parallel_size,
            pp=model.pipeline_model_parallel_size,
            cp=model.context_parallel_size,
        )
    except TopologyError as error:
        return str(error)
    return None


def _batch(config: RunConfig, world_size: int) -> str | None:
    model, training = config.model, config.training
    shards = (
        model.tensor_model_parallel_size
        * model.pipeline_model_parallel_size
        * model.context_parallel_size
    )
    micro, batch = training.micro_batch_size, training.global_batch_size
    if micro is None or batch is None or world_size % shards:
        return None
    dp = world_size // shards
    per_step = micro * dp
    if batch % per_step == 0:
        return None
    nearest = ", ".join(
        str(n) for n in (batch // per_step * per_step, -(-batch // per_step) * per_step) if n
    )
    return (
        f"--global-batch-size ({batch}) must be a multiple of --micro-batch-size ({micro}) x "
        f"data-parallel size ({dp}) = {per_step}; nearest: {nearest}"
    )


def _train_samples(config: RunConfig, world_size: int) -> str | None:
    del world_size
    samples, batch = config.training.train_samples, config.training.global_batch_size
    if samples is None or batch is None or samples >= batch:
        return None
    return f"--train-samples ({samples}) is less than one global batch ({batch})"


def _sequence_parallel(config: RunConfig, world_size: int) -> str | None:
    del world_size
    model, length = config.model, config.training.seq_length
    tp = model.tensor_model_parallel_size
    if not model.sequence_parallel or length is None or length % tp == 0:
        return None
    return (
        f"--seq-length ({length}) must be divisible by --tensor-model-parallel-size ({tp}) with "
        f"--sequence-parallel; nearest: {length // tp * tp}, {-(-length // tp) * tp}"
    )


def _positions(config: RunConfig, world_size: int) -> str | None:
    del world_size
    positions, length = config.gpt.max_position_embeddings, config.training.seq_length
    if positions is None or length is None or length <= positions:
        return None
    return (
        f"--seq-length ({length}) exceeds --max-position-embeddings ({positions}); "
        f"shorten it or raise the other"
    )


def _context_parallel(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if config.model.context_parallel_size == 1:
        return None
    return "--context-parallel-size above 1 is not built yet; use 1"


def _virtual(config: RunConfig, world_size: int) -> str | None:
    del world_size
    vpp, pp = (
        config.model.virtual_pipeline_model_parallel_size,
        config.model.pipeline_model_parallel_size,
    )
    if vpp is None or pp > 1:
        return None
    return (
        f"--num-virtual-stages-per-pipeline-rank ({vpp}) needs a --pipeline-model-parallel-size of "
        "at least 2; drop it or raise the pipeline size"
    )


def _layers(config: RunConfig, world_size: int) -> str | None:
    del world_size
    model = config.model
    stages = model.pipeline_model_parallel_size * (model.virtual_pipeline_model_parallel_size or 1)
    if model.num_layers % stages == 0:
        return None
    low = model.num_layers // stages * stages
    nearest = ", ".join(str(n) for n in (low, low + stages) if n)
    return (
        f"--num-layers ({model.num_layers}) must be divisible by the {stages} pipeline stages; "
        f"nearest: {nearest}"
    )


def _data(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if config.data.has_data:
        return None
    return "no training data: give --data-path PREFIX (see --help for the other forms)"


def _masks(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if not config.data.reset_attention_mask:
        return None
    return (
        "--reset-attention-mask is not built into attention yet; drop it (--reset-position-ids and "
        "--eod-mask-loss work)"
    )


def _tokenizer(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if config.tokenizer.tokenizer_type is None:
        return "--tokenizer-type is missing; the vocabulary and the end-of-document id come from it"
    return None


def _save(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if config.checkpoint.save is not None and config.checkpoint.save_interval is None:
        return "--save needs --save-interval N, the iterations between checkpoints"
    return None


CHECKS: tuple[Check, ...] = (
    _required,
    _world,
    _batch,
    _train_samples,
    _sequence_parallel,
    _positions,
    _context_parallel,
    _virtual,
    _layers,
    _data,
    _masks,
    _tokenizer,
    _save,
)


def check(config: RunConfig, world_size: int) -> None:
    """Raise one `ConfigError` that lists everything wrong with a configuration."""
    problems = [problem for rule in CHECKS if (problem := rule(config, world_size)) is not None]
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        listed = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(problems, 1))
        raise ConfigError(f"{len(problems)} problems with the options:\n{listed}")
