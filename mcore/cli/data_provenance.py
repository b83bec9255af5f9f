"""`mcore data provenance`: which documents were in the global batch of an iteration."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from mcore.config.command_line import add_flags
from mcore.config.data import DataConfig
from mcore.config.tokenizer import TokenizerConfig
from mcore.config.training import TrainingConfig

_OTHER_DATA = ("num_workers", "multiple_validation_sets", "validation_set_names")
_VOCABULARY_PADDING = ("make_vocab_size_divisible_by",)
_NO_EFFECT = ("bf16", "exit_interval", "skip_train")


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "provenance",
        help="the documents behind the global batch of an iteration",
        description="Give the data and batch options of the run, and with --sft those of the "
        "tokenizer. Each sample is printed with the pieces of documents that it is made of, its "
        "last label included, or with the lines of its conversations; nothing is run.",
    )
    batch = parser.add_mutually_exclusive_group(required=True)
    batch.add_argument(
        "--iteration",
        type=int,
        metavar="N",
        help="from 1, of a run whose batch options never changed",
    )
    batch.add_argument(
        "--consumed-samples",
        type=int,
        metavar="N",
        help="in its place: samples consumed before the batch, which the log and the record of the "
        "iteration before it tell; the batch options are those of the iteration",
    )
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
    add_flags(parser, TokenizerConfig, omit=_VOCABULARY_PADDING)
    fields = TrainingConfig.__dataclass_fields__
    add_flags(parser, TrainingConfig, omit=[name for name in _NO_EFFECT if name in fields])
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    return int(importlib.import_module("mcore.cli.batch_documents").run_provenance(args))
