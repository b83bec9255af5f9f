"""The documents behind a global batch: what `mcore data provenance` does.

Apart from its command line (`data_provenance`), since it takes torch to read a checkpoint and the
other data commands start without.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json

from mcore.checkpoint import read_common
from mcore.config.command_line import take_config
from mcore.config.data import DataConfig
from mcore.config.run import batch_size_calculator, largest_batch
from mcore.config.tokenizer import TokenizerConfig
from mcore.config.training import TrainingConfig
from mcore.data.builder import build_train_valid_test_datasets
from mcore.data.gpt_dataset import SampleDataset
from mcore.data.provenance import placed_samples
from mcore.data.sft_builder import build_sft_datasets
from mcore.data.split_source import split_source
from mcore.data.stable_blend import StableBlend
from mcore.errors import ConfigError, DataError
from mcore.num_microbatches_calculator import NumMicroBatchesCalculator
from mcore.tokenizers import build_tokenizer, encode_segments, start_ids


def run_provenance(args: argparse.Namespace) -> int:
    """`mcore data provenance`.

    Raises:
        ConfigError: an option is missing.
        DataError: data that cannot be used, or a batch beyond the run.
        CheckpointError: there is none where `--load` says.
    """
    data, training = take_config(DataConfig, args), _with_micro_batch(args)
    if training.max_tokens_per_microbatch is not None and not data.sft:
        raise ConfigError("--max-tokens-per-microbatch is for fine-tuning data: add --sft")
    if training.seq_length is None:
        raise ConfigError("--seq-length is missing")
    if training.global_batch_size is None and training.step_batch_size_schedule is None:
        raise ConfigError("--global-batch-size is missing")
    calculator = batch_size_calculator(training, args.data_parallel_size)
    wanted = training.train_samples or (training.train_iters or 0) * largest_batch(calculator)
    if not wanted:
        raise ConfigError("--train-iters or --train-samples is missing: the order depends on it")
    consumed, size = _batch_of(calculator, args.iteration, args.consumed_samples)
    if consumed + size > wanted:
        raise DataError(
            f"samples {consumed} to {consumed + size - 1} are beyond the run of {wanted} samples"
        )
    dataset = _training_data(data, training, training.seq_length, wanted, args)
    if dataset is None:
        source = split_source(data, 0)
        raise DataError(
            f"the training split of {source.files} is empty; give it a share in --split"
        )
    if args.load is not None:
        _follow_checkpoint(dataset, args.load, args.ckpt_step)
    positions, micro = range(consumed, consumed + size), training.micro_batch_size or 1
    unit = "line" if data.sft else "document"
    for position, number in placed_samples(
        dataset, data, positions, micro, args.data_parallel_size
    ):
        _print(position, number, dataset, args.json, unit)
    return 0


def _with_micro_batch(args: argparse.Namespace) -> TrainingConfig:
    training = take_config(TrainingConfig, args)
    return dataclasses.replace(training, micro_batch_size=training.micro_batch_size or 1)


def _training_data(
    data: DataConfig,
    training: TrainingConfig,
    seq_length: int,
    wanted: int,
    args: argparse.Namespace,
) -> SampleDataset | None:
    sizes = (wanted, 0, 0)
    if not data.sft:
        return build_train_valid_test_datasets(
            data, sizes=sizes, seq_length=seq_length, seed=training.seed, eod_id=0
        )[0]
    tokenizer = build_tokenizer(take_config(TokenizerConfig, args))
    return build_sft_datasets(
        data,
        sizes=sizes,
        seq_length=seq_length,
        seed=training.seed,
        encode=functools.partial(encode_segments, tokenizer),
        eod_id=tokenizer.eod,
        start_ids=start_ids(tokenizer),
        budget=training.max_tokens_per_microbatch,
    )[0]


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


def _batch_of(
    calculator: NumMicroBatchesCalculator, iteration: int | None, consumed: int | None
) -> tuple[int, int]:
    """Samples consumed before the batch, and those of it."""
    if consumed is not None:
        if consumed < 0:
            raise DataError(f"--consumed-samples is {consumed}; use 0 or more")
        calculator.update(consumed)
        return consumed, calculator.get_current_running_global_batch_size()
    assert iteration is not None
    if iteration < 1:
        raise DataError(f"--iteration is {iteration}; the first one is 1")
    consumed = 0
    for number in range(1, iteration + 1):
        calculator.update(consumed)
        size = calculator.get_current_running_global_batch_size()
        if number < iteration:
            consumed += size
    return consumed, size


def _print(position: int, number: int, dataset: SampleDataset, as_json: bool, unit: str) -> None:
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
            f"  {piece.prefix} {unit} {piece.document} tokens [{piece.offset}, "
            f"{piece.offset + piece.length})"
        )
