"""`mcore data provenance`: which documents were in the global batch of an iteration."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mcore.config.command_line import add_flags, take_config
from mcore.config.data import DataConfig
from mcore.config.training import TrainingConfig
from mcore.data.builder import build_train_valid_test_datasets
from mcore.data.gpt_dataset import SampleDataset
from mcore.data.provenance import build_sampler, samples_between
from mcore.errors import ConfigError, DataError
from mcore.num_microbatches_calculator import (
    NumMicroBatchesCalculator,
    StepBatchsizeNumMicroBatchesCalculator,
    build_num_microbatches_calculator,
    parse_step_schedule,
)

_OTHER_DATA = (
    "num_workers",
    "multiple_validation_sets",
    "validation_set_names",
    "sft",
    "sft_tokenizer_prompt_format",
)
_NO_EFFECT = ("bf16", "exit_interval", "skip_train")


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "provenance",
        help="the documents behind the global batch of an iteration",
        description="Give the data and batch options of the run. Each sample is printed with the "
        "pieces of documents that it is made of, its last label included; nothing is run.",
    )
    parser.add_argument("--iteration", type=int, required=True, metavar="N", help="from 1")
    parser.add_argument(
        "--data-parallel-size", type=int, default=1, metavar="N", help="only matters with cyclic"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a sample")
    add_flags(parser, DataConfig, omit=_OTHER_DATA)
    fields = TrainingConfig.__dataclass_fields__
    add_flags(parser, TrainingConfig, omit=[name for name in _NO_EFFECT if name in fields])
    parser.set_defaults(run=run_provenance)


def run_provenance(args: argparse.Namespace) -> int:
    """`mcore data provenance`.

    Raises:
        ConfigError: an option is missing.
        DataError: data that cannot be used, or an iteration beyond the run.
    """
    data, training = take_config(DataConfig, args), take_config(TrainingConfig, args)
    if training.seq_length is None:
        raise ConfigError("--seq-length is missing")
    calculator = _calculator(training, args.data_parallel_size)
    wanted = training.train_samples or (training.train_iters or 0) * (
        calculator.get_current_global_batch_size()
    )
    if not wanted:
        raise ConfigError("--train-iters or --train-samples is missing: the order depends on it")
    consumed, size = _batch_of(calculator, args.iteration)
    if consumed + size > wanted:
        raise DataError(f"iteration {args.iteration} is beyond the run of {wanted} samples")
    dataset = build_train_valid_test_datasets(
        data, sizes=(wanted, 0, 0), seq_length=training.seq_length, seed=training.seed, eod_id=0
    )[0]
    if dataset is None:
        raise DataError("the training split is empty; give it a share in --split")
    for position, number in _samples(
        data, training, dataset, args, range(consumed, consumed + size)
    ):
        _print(position, number, dataset, args.json)
    return 0


def _calculator(training: TrainingConfig, dp: int) -> NumMicroBatchesCalculator:
    micro = training.micro_batch_size or 1
    if training.step_batch_size_schedule is not None:
        assert training.seq_length is not None
        schedule = parse_step_schedule(training.step_batch_size_schedule, training.seq_length)
        return StepBatchsizeNumMicroBatchesCalculator(schedule, micro, dp)
    if training.global_batch_size is None:
        raise ConfigError("--global-batch-size is missing")
    return build_num_microbatches_calculator(
        1,
        training.rampup_batch_size,
        training.global_batch_size,
        micro,
        dp,
        training.decrease_batch_size_if_needed,
    )


def _batch_of(calculator: NumMicroBatchesCalculator, iteration: int) -> tuple[int, int]:
    """Samples consumed before an iteration, and those of it."""
    if iteration < 1:
        raise DataError(f"--iteration is {iteration}; the first one is 1")
    consumed = 0
    for number in range(1, iteration + 1):
        calculator.update(consumed)
        size = calculator.get_current_running_global_batch_size()
        if number < iteration:
            consumed += size
    return consumed, size


def _samples(
    data: DataConfig,
    training: TrainingConfig,
    dataset: SampleDataset,
    args: argparse.Namespace,
    positions: range,
) -> list[tuple[int, int]]:
    """(place in the run, number in the data set) of each sample of a batch, by place."""
    dp, micro = args.data_parallel_size, training.micro_batch_size or 1
    samplers = [build_sampler(data, len(dataset), micro, rank, dp) for rank in range(dp)]
    return samples_between(samplers, positions)


def _print(position: int, number: int, dataset: SampleDataset, as_json: bool) -> None:
    pieces = dataset.provenance(number)
    if as_json:
        rows = [
            {"prefix": p.prefix, "document": p.document, "offset": p.offset, "length": p.length}
            for p in pieces
        ]
        print(json.dumps({"sample": position, "pieces": rows}))
        return
    print(f"sample {position}")
    for piece in pieces:
        print(
            f"  {piece.prefix} document {piece.document} tokens [{piece.offset}, "
            f"{piece.offset + piece.length})"
        )
