"""`mcore data provenance`: which documents were in the global batch of an iteration."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from mcore.checkpoint import read_common
from mcore.config.command_line import add_flags, take_config
from mcore.config.data import DataConfig
from mcore.config.run import batch_size_calculator, largest_batch
from mcore.config.training import TrainingConfig
from mcore.data.builder import build_train_valid_test_datasets
from mcore.data.gpt_dataset import SampleDataset
from mcore.data.provenance import build_sampler, samples_between
from mcore.data.split_source import split_source
from mcore.data.stable_blend import StableBlend
from mcore.errors import ConfigError, DataError, UnsupportedError
from mcore.num_microbatches_calculator import NumMicroBatchesCalculator

_OTHER_DATA = ("num_workers", "multiple_validation_sets", "validation_set_names")
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
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="matters with cyclic and --decrease-batch-size-if-needed",
    )
    parser.add_argument(
        "--load",
        metavar="DIR",
        help="with --data-order stable: a checkpoint of the run, which knows the weights that its "
        "blend has had; without it the weights never changed",
    )
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="which; the newest when absent")
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
        CheckpointError: there is none where `--load` says.
        UnsupportedError: fine-tuning data.
    """
    data, training = take_config(DataConfig, args), _with_micro_batch(args)
    if data.sft or training.max_tokens_per_microbatch is not None:
        raise UnsupportedError(
            "mcore data provenance reads token files only; fine-tuning data (--sft, "
            "--max-tokens-per-microbatch) would have to be tokenized first"
        )
    if training.seq_length is None:
        raise ConfigError("--seq-length is missing")
    if training.global_batch_size is None and training.step_batch_size_schedule is None:
        raise ConfigError("--global-batch-size is missing")
    calculator = batch_size_calculator(training, args.data_parallel_size)
    wanted = training.train_samples or (training.train_iters or 0) * largest_batch(calculator)
    if not wanted:
        raise ConfigError("--train-iters or --train-samples is missing: the order depends on it")
    consumed, size = _batch_of(calculator, args.iteration)
    if consumed + size > wanted:
        raise DataError(f"iteration {args.iteration} is beyond the run of {wanted} samples")
    dataset = build_train_valid_test_datasets(
        data, sizes=(wanted, 0, 0), seq_length=training.seq_length, seed=training.seed, eod_id=0
    )[0]
    if dataset is None:
        source = split_source(data, 0)
        raise DataError(
            f"the training split of {source.files} is empty; give it a share in --split"
        )
    if args.load is not None:
        _follow_checkpoint(dataset, args.load, args.ckpt_step)
    for position, number in _samples(
        data, training, dataset, args, range(consumed, consumed + size)
    ):
        _print(position, number, dataset, args.json)
    return 0


def _with_micro_batch(args: argparse.Namespace) -> TrainingConfig:
    training = take_config(TrainingConfig, args)
    return dataclasses.replace(training, micro_batch_size=training.micro_batch_size or 1)


def _follow_checkpoint(dataset: SampleDataset, load: str, step: int | None) -> None:
    """Weights and cursors that a stable blend had in the run."""
    common = read_common(load, step)
    segments = common.get("data_segments", [])
    if not isinstance(dataset, StableBlend) or not segments:
        raise ConfigError(
            f"--load {load} is of no use here: a checkpoint knows something about the order of "
            "samples only in a run with --data-order stable; give that option as the run did, or "
            "leave --load out"
        )
    dataset.restore(segments, common["consumed_train_samples"])


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
    missing = dataset.missing_corpus(number) if isinstance(dataset, StableBlend) else None
    pieces = () if missing is not None else dataset.provenance(number)
    if as_json:
        rows = [
            {"prefix": p.prefix, "document": p.document, "offset": p.offset, "length": p.length}
            for p in pieces
        ]
        gone = {} if missing is None else {"missing_corpus": missing}
        print(json.dumps({"sample": position, "pieces": rows, **gone}))
        return
    print(f"sample {position}")
    if missing is not None:
        print(f"  {missing}, which is no longer in the data path; add it to see the documents")
    for piece in pieces:
        print(
            f"  {piece.prefix} document {piece.document} tokens [{piece.offset}, "
            f"{piece.offset + piece.length})"
        )
