"""Rules of the batch: whole micro batches for every rank, in training and in evaluation.

They are among the rules of `mcore.config.checks`.
"""

from __future__ import annotations

from mcore.config.run import RunConfig, batch_size_calculator, largest_batch
from mcore.errors import ConfigError
from mcore.num_microbatches_calculator import NumMicroBatchesCalculator, parse_step_schedule


def batch(config: RunConfig, world_size: int) -> str | None:
    """The global batch, at every size it takes on, is a whole number of micro batches."""
    training, shards = config.training, config.model.model_parallel_size
    micro, batch = training.micro_batch_size, training.global_batch_size
    if micro is None or batch is None or world_size % shards:
        return None
    dp = world_size // shards
    per_step = micro * dp
    if training.rampup_batch_size is not None:
        return _ramp(config, dp)
    if batch % per_step == 0:
        return None
    if training.decrease_batch_size_if_needed and batch > per_step:
        return None
    return (
        f"--global-batch-size ({batch}) must be a multiple of --micro-batch-size ({micro}) x "
        f"data-parallel size ({dp}) = {per_step}, and {batch} / {per_step} leaves "
        f"{batch % per_step}; nearest: {_nearest(batch, per_step)}; data-parallel size = "
        f"{world_size} processes / {shards} of tensor x pipeline"
    )


def _nearest(size: int, step: int) -> str:
    """The multiples of a step on both sides of a size that is none."""
    return ", ".join(str(n) for n in (size // step * step, -(-size // step) * step) if n)


def _ramp(config: RunConfig, dp: int) -> str | None:
    """Every batch size of the ramp is a whole number of micro batches."""
    training = config.training
    assert training.rampup_batch_size is not None
    assert training.global_batch_size is not None
    assert training.micro_batch_size is not None
    if len(training.rampup_batch_size) != 3:
        return None  # said with the options of training
    start, increment, _ = training.rampup_batch_size
    per_step = training.micro_batch_size * dp
    if start < 1 or increment < 1 or (training.global_batch_size - start) % increment:
        return (
            f"--rampup-batch-size {start} {increment}: whole steps of the increment must lead from "
            f"the start to --global-batch-size ({training.global_batch_size})"
        )
    sizes = range(start, training.global_batch_size + 1, increment)
    bad = next((size for size in sizes if size % per_step), None)
    if bad is None or (training.decrease_batch_size_if_needed and start >= per_step):
        return None
    return (
        f"--rampup-batch-size reaches a global batch of {bad}, which is no multiple of "
        f"--micro-batch-size ({training.micro_batch_size}) x data-parallel size ({dp}) = "
        f"{per_step}; change start or increment, or use --decrease-batch-size-if-needed"
    )


def evaluation(config: RunConfig, world_size: int) -> str | None:
    """Whole micro batches in an evaluated batch, and data that can be measured so."""
    training, options = config.training, config.evaluation
    if config.data.sft and options.full_validation:
        return "--full-validation is not available with --sft; give --eval-iters"
    sizes = (options.eval_micro_batch_size, options.eval_global_batch_size)
    if sizes == (None, None):
        return None
    if training.max_tokens_per_microbatch is not None:
        return (
            "--eval-micro-batch-size and --eval-global-batch-size are not available with "
            "--max-tokens-per-microbatch"
        )
    calculator = _calculator(config, world_size)
    if calculator is None:
        return None
    dp = calculator.data_parallel_size
    micro = options.eval_micro_batch_size or calculator.micro_batch_size
    batch = options.eval_global_batch_size or largest_batch(calculator)
    if batch % (micro * dp) == 0:
        return None
    origin = "" if options.eval_global_batch_size else ", that of training"
    return (
        f"--eval-global-batch-size ({batch}{origin}) must be a multiple of "
        f"--eval-micro-batch-size ({micro}) x data-parallel size ({dp}) = {micro * dp}; "
        f"nearest: {_nearest(batch, micro * dp)}"
    )


def _calculator(config: RunConfig, world_size: int) -> NumMicroBatchesCalculator | None:
    """The batch of every step, or None where other rules tell why there is none."""
    shards = config.model.model_parallel_size
    if config.training.micro_batch_size is None or world_size % shards:
        return None
    try:
        return batch_size_calculator(config.training, world_size // shards)
    except ConfigError:
        return None


def step_schedule(config: RunConfig, world_size: int) -> str | None:
    """Every size of a schedule of batch sizes is a whole number of micro batches."""
    training = config.training
    text, micro, length = (
        training.step_batch_size_schedule,
        training.micro_batch_size,
        training.seq_length,
    )
    if text is None or micro is None or length is None:
        return None
    per_step = micro * max(1, world_size // config.model.model_parallel_size)
    try:
        sizes = [size for _, size in parse_step_schedule(text, length)]
    except ConfigError as error:
        return str(error)
    bad = next((size for size in sizes if size % per_step), None)
    if bad is None:
        return None
    return (
        f"--step-batch-size-schedule has a global batch of {bad}, which is no multiple of "
        f"--micro-batch-size x data-parallel size = {per_step}"
    )


def train_samples(config: RunConfig, world_size: int) -> str | None:
    """There is at least one global batch to train on."""
    samples, calculator = config.training.train_samples, _calculator(config, world_size)
    if samples is None or calculator is None:
        return None
    first = calculator.global_batch_size_at(0)
    if samples >= first:
        return None
    return f"--train-samples ({samples}) is less than one global batch ({first})"


def token_budget(config: RunConfig, world_size: int) -> str | None:
    """Micro batches by tokens: for fine-tuning data, of one size, and long enough."""
    del world_size
    training = config.training
    budget = training.max_tokens_per_microbatch
    if budget is None:
        return None
    if not config.data.sft:
        return "--max-tokens-per-microbatch is for fine-tuning data: add --sft"
    if training.micro_batch_size not in (None, 1):
        return (
            f"--max-tokens-per-microbatch makes micro batches of one row: --micro-batch-size is "
            f"{training.micro_batch_size}, use 1"
        )
    if training.rampup_batch_size or training.step_batch_size_schedule:
        return "--max-tokens-per-microbatch and a growing batch size exclude each other"
    if training.seq_length is not None and budget < training.seq_length:
        return (
            f"--max-tokens-per-microbatch ({budget}) must hold the longest conversation, "
            f"--seq-length ({training.seq_length})"
        )
    return None
