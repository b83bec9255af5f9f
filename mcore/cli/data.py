"""`mcore data`: what is in the training data."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import numpy as np

from mcore.cli import data_files, data_provenance, data_show
from mcore.config.command_line import add_flags, take_config
from mcore.config.data import DataConfig
from mcore.config.tokenizer import TokenizerConfig
from mcore.data.builder import DatasetGroup, build_train_valid_test_datasets
from mcore.data.gpt_dataset import SampleDataset
from mcore.data.splits import SPLIT_NAMES
from mcore.errors import DataError
from mcore.tokenizers import build_tokenizer
from tools import preprocess_data

_READING_OPTIONS = (
    "num_workers",
    "dataloader_type",
    "data_sharding",
    "multiple_validation_sets",
    "validation_set_names",
    "sft",
    "sft_tokenizer_prompt_format",
)
_VOCABULARY_PADDING = ("make_vocab_size_divisible_by",)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its sub-commands."""
    parser = subparsers.add_parser("data", help="look into training data", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _register_samples(commands)
    data_files.register(commands)
    data_show.register(commands)
    data_provenance.register(commands)
    preprocess = commands.add_parser(
        "preprocess",
        help="text into indexed token files (tools/preprocess_data.py)",
        description=preprocess_data.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    preprocess_data.add_arguments(preprocess)
    preprocess.set_defaults(run=preprocess_data.run_arguments)


def _register_samples(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "samples",
        help="write the samples that training would read",
        description="Write every sample of every split, in order, as arrays train.tokens, "
        "train.labels, train.position_ids (int64) and train.loss_mask (float32), "
        "[samples, seq_length] each, and likewise valid.* and test.*. A split without data has no "
        "arrays.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--samples",
        nargs=3,
        type=_sample_count,
        required=True,
        metavar=("TRAIN", "VALID", "TEST"),
        help="samples wanted of each split; none = one pass over its corpus, 0 = leave it out",
    )
    parser.add_argument("--seq-length", type=int, required=True, help="tokens per sample")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the sample order")
    parser.add_argument("--out", required=True, metavar="FILE.npz", help="file to write")
    add_flags(parser.add_argument_group("data"), DataConfig, omit=_READING_OPTIONS)
    add_flags(parser.add_argument_group("tokenizer"), TokenizerConfig, omit=_VOCABULARY_PADDING)
    parser.set_defaults(run=write_samples)


def write_samples(args: argparse.Namespace) -> int:
    """`mcore data samples`.

    Raises:
        McoreError: options or data that cannot be used.
    """
    if args.seq_length < 1:
        raise DataError(f"--seq-length is {args.seq_length}; use 1 or more")
    tokenizer_config = take_config(TokenizerConfig, args)
    tokenizer = build_tokenizer(tokenizer_config)
    train, valid, test = args.samples
    datasets = build_train_valid_test_datasets(
        take_config(DataConfig, args),
        sizes=(train, valid, test),
        seq_length=args.seq_length,
        seed=args.seed,
        eod_id=tokenizer.eod,
        pad_id=tokenizer.pad,
        vocab_size=tokenizer.vocab_size,
        tokenizer=data_show.tokenizer_identity(tokenizer, tokenizer_config),
    )
    arrays: dict[str, np.ndarray] = {}
    for name, dataset in zip(SPLIT_NAMES, datasets, strict=True):
        if dataset is None:
            print(f"{name}: no data")
            continue
        assert not isinstance(dataset, DatasetGroup)
        arrays.update((f"{name}.{key}", array) for key, array in _all_samples(dataset))
        print(f"{name}: {len(dataset)} samples of {args.seq_length} tokens")
    _save(args.out, arrays)
    return 0


def _all_samples(dataset: SampleDataset) -> Iterator[tuple[str, np.ndarray]]:
    """Every array of the samples, stacked: [samples, seq_length]."""
    first = {key: row for key, row in dataset[0].items() if key != "is_document_start"}
    arrays = {key: np.empty((len(dataset), *row.shape), row.dtype) for key, row in first.items()}
    for index in range(len(dataset)):
        sample = dataset[index]
        for key, array in arrays.items():
            array[index] = sample[key]
    yield from arrays.items()


def _save(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Under the very name that was asked for, complete or not at all."""
    partial = path + ".partial"
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(partial, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    os.replace(partial, path)


def _sample_count(word: str) -> int | None:
    if word.lower() == "none":
        return None
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is neither a number of samples nor none")
    return int(word)
