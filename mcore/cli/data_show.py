"""`mcore data show`: documents of an indexed dataset as text."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

from mcore.config.command_line import add_flags, take_config
from mcore.config.tokenizer import TokenizerConfig
from mcore.data.corpus_meta import TokenizerIdentity, check_meta, read_meta
from mcore.data.indexed_dataset import IndexedDataset
from mcore.errors import ConfigError, DataError
from mcore.log import get_logger
from mcore.tokenizers import Tokenizer, build_tokenizer, fingerprint


def register(commands: Any) -> None:
    """Add the sub-command."""
    show = commands.add_parser("show", help="print documents as text")
    show.add_argument("prefix", metavar="PREFIX", help="data set to read")
    show.add_argument("--document", type=int, default=0, metavar="N", help="the first one")
    show.add_argument("--count", type=int, default=1, metavar="N", help="how many")
    show.add_argument("--ids", action="store_true", help="token ids in place of text")
    add_flags(show, TokenizerConfig)
    show.set_defaults(run=run_show)


def run_show(args: argparse.Namespace) -> int:
    """`mcore data show`.

    Raises:
        DataError: no such document, or another tokenizer made the data set.
    """
    data = IndexedDataset(args.prefix)
    documents = len(data.document_indices) - 1
    last = args.document + args.count
    if not 0 <= args.document < last <= documents:
        raise DataError(
            f"documents {args.document} to {last - 1} are asked for, and {args.prefix} has 0 to "
            f"{documents - 1}; give --document and --count within these"
        )
    tokenizer = None if args.ids else _tokenizer_of(data, take_config(TokenizerConfig, args))
    for number in range(args.document, last):
        sequences = range(*data.document_indices[number : number + 2].tolist())
        print(f"--- document {number}: {sum(len(data[s]) for s in sequences)} tokens")
        for sequence in sequences:
            ids = data[sequence].tolist()
            print(
                _numbers(ids) if tokenizer is None else _text(ids, tokenizer, args.prefix, number)
            )
    return 0


def tokenizer_identity(tokenizer: Tokenizer, config: TokenizerConfig) -> TokenizerIdentity:
    """What the note beside a data set is compared with."""
    try:
        eod: int | None = tokenizer.eod
    except ConfigError:  # it has none
        eod = None
    return TokenizerIdentity(
        str(config.tokenizer_type),
        tokenizer.vocab_size,
        eod,
        functools.cache(lambda: fingerprint(tokenizer)),
    )


def _tokenizer_of(data: IndexedDataset, config: TokenizerConfig) -> Tokenizer:
    """The tokenizer, which must be that of the data set as far as this is known."""
    tokenizer = build_tokenizer(config)
    prefix = data.path_prefix
    check_meta(prefix, data.num_tokens, tokenizer_identity(tokenizer, config))
    if read_meta(prefix) is None:
        get_logger().warning(
            "%s has no .meta.json, which would show whether %s made it; if the text reads wrong, "
            "it did not",
            prefix,
            config.tokenizer_type,
        )
    return tokenizer


def _numbers(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _text(ids: Sequence[int], tokenizer: Tokenizer, prefix: str, document: int) -> str:
    wrong = next((i for i in ids if not 0 <= i < tokenizer.vocab_size), None)
    if wrong is not None:
        raise DataError(
            f"token id {wrong} in document {document} of {prefix} is outside the vocabulary of "
            f"{tokenizer.vocab_size}; the data set was made with another tokenizer"
        )
    return tokenizer.detokenize(ids)
