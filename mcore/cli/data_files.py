"""`mcore data inspect | merge | split`: indexed datasets as files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mcore.data.corpus_meta import CorpusMeta, publish_corpus, read_meta, seal_corpus
from mcore.data.indexed_builder import IndexedDatasetBuilder
from mcore.data.indexed_dataset import IndexedDataset
from mcore.data.splits import SPLIT_NAMES, split_bounds, split_range
from mcore.errors import DataError

_TOKENS_AT_ONCE = 1 << 24
_ROWS_AT_ONCE = 1 << 16

Subparsers = Any  # argparse's own type of `add_subparsers` is private


def register(commands: Subparsers) -> None:
    """Add the sub-commands."""
    inspect = commands.add_parser("inspect", help="sizes, lengths, ids and origin of a data set")
    inspect.add_argument("prefix", nargs="+", metavar="PREFIX", help="files without .bin and .idx")
    inspect.add_argument("--json", action="store_true", help="one JSON object a line")
    inspect.set_defaults(run=run_inspect)

    merge = commands.add_parser("merge", help="append data sets to one another, in order")
    merge.add_argument("prefix", nargs="+", metavar="PREFIX", help="data sets of one tokenizer")
    merge.add_argument("--output-prefix", required=True, metavar="PATH", help="data set to make")
    merge.set_defaults(run=run_merge)

    split = commands.add_parser("split", help="cut a data set as --split would, into files")
    split.add_argument("prefix", metavar="PREFIX", help="data set to cut")
    split.add_argument("--split", required=True, metavar="SHARES", help="such as 90,8,2")
    split.add_argument(
        "--output-prefix", required=True, metavar="PATH", help="becomes PATH_train, _valid, _test"
    )
    split.set_defaults(run=run_split)


def run_inspect(args: argparse.Namespace) -> int:
    """`mcore data inspect`.

    Raises:
        DataError: files that are absent or damaged.
    """
    for prefix in args.prefix:
        facts = describe(prefix)
        if args.json:
            print(json.dumps(facts))
            continue
        print(f"{prefix}:")
        for name, value in facts.items():
            if name != "prefix":
                print(f"  {name.replace('_', ' ')}: {value}")
    return 0


def describe(prefix: str) -> dict[str, Any]:
    """What the files and the note beside them say; reads every token once."""
    data = IndexedDataset(prefix)
    meta = read_meta(prefix)
    lengths = data.sequence_lengths
    sequences_of = np.diff(data.document_indices)
    facts: dict[str, Any] = {
        "prefix": prefix,
        "dtype": data.dtype.name,
        "documents": len(data.document_indices) - 1,
        "empty_documents": int(np.count_nonzero(sequences_of == 0)),
        "sequences": len(data),
        "tokens": data.num_tokens,
        "bytes": data.num_tokens * data.dtype.itemsize,
    }
    if len(data):
        quantiles = np.quantile(lengths, [0, 0.5, 0.99, 1])
        facts["sequence_length"] = dict(
            zip(("min", "median", "p99", "max"), quantiles.tolist(), strict=True)
        )
    if data.num_tokens:
        facts["lowest_id"], facts["highest_id"] = _id_range(prefix, data)
    facts["meta"] = None if meta is None else dataclasses.asdict(meta)
    return facts


def _id_range(prefix: str, data: IndexedDataset) -> tuple[int, int]:
    tokens = np.memmap(prefix + ".bin", data.dtype, "r")
    parts = range(0, len(tokens), _TOKENS_AT_ONCE)
    lows = [int(tokens[at : at + _TOKENS_AT_ONCE].min()) for at in parts]
    highs = [int(tokens[at : at + _TOKENS_AT_ONCE].max()) for at in parts]
    return min(lows), max(highs)


def run_merge(args: argparse.Namespace) -> int:
    """`mcore data merge`.

    Raises:
        DataError: data sets of different token types or tokenizers.
    """
    _refuse_overwriting(args.output_prefix, args.prefix)
    metas = [read_meta(prefix) for prefix in args.prefix]
    merged = _merge_metas(args.prefix, metas)
    first = IndexedDataset(args.prefix[0])
    with IndexedDatasetBuilder(args.output_prefix + ".bin", first.dtype) as builder:
        for prefix in args.prefix:
            builder.add_index(prefix)
        _finish(builder, args.output_prefix, merged)
    made = IndexedDataset(args.output_prefix)
    print(f"{args.output_prefix}: {len(made)} sequences, {made.num_tokens} tokens")
    return 0


def _merge_metas(prefixes: Sequence[str], metas: Sequence[CorpusMeta | None]) -> CorpusMeta | None:
    """The note of the whole; none if one is missing."""
    known = [(prefix, meta) for prefix, meta in zip(prefixes, metas, strict=True) if meta]
    for prefix, meta in known:
        if meta.tokenizer_fingerprint != known[0][1].tokenizer_fingerprint:
            raise DataError(
                f"{prefix} and {known[0][0]} were made with different tokenizers "
                f"({meta.tokenizer_type}, {known[0][1].tokenizer_type}); preprocess both with one"
            )
    if len(known) < len(prefixes):
        return None
    counts = (
        *("documents", "empty_documents", "sequences"),
        *("tokens", "eod_tokens", "faulty_records"),
    )
    totals = {name: sum(getattr(meta, name) for _, meta in known) for name in counts}
    append_eod = all(meta.append_eod for _, meta in known)
    return dataclasses.replace(known[0][1], append_eod=append_eod, **totals)


def run_split(args: argparse.Namespace) -> int:
    """`mcore data split`.

    Raises:
        DataError: a split string that cannot be used, or a part that would be empty.
    """
    data = IndexedDataset(args.prefix)
    meta = read_meta(args.prefix)
    for name, chosen in _parts(args.split, data).items():
        output = f"{args.output_prefix}_{name}"
        _refuse_overwriting(output, [args.prefix])
        with IndexedDatasetBuilder(output + ".bin", data.dtype) as builder:
            eods = _copy(data, chosen, builder, None if meta is None else meta.eod_id)
            part = _part_meta(meta, data, chosen, eods)
            _finish(builder, output, part)
        print(f"{output}: {len(chosen)} sequences")
    return 0


def _parts(split: str, data: IndexedDataset) -> dict[str, range]:
    """The sequences of each part that has a share."""
    parts = {
        name: split_range(bounds, len(data))
        for name, bounds in zip(SPLIT_NAMES, split_bounds(split), strict=True)
        if bounds is not None
    }
    for name, chosen in parts.items():
        if not chosen:
            raise DataError(
                f"the {name} part would hold none of the {len(data)} sequences of "
                f"{data.path_prefix}: its share in --split {split} is too small; give it a larger "
                "one, or 0 to leave the part out"
            )
    return parts


def _copy(
    data: IndexedDataset, chosen: range, builder: IndexedDatasetBuilder, eod: int | None
) -> int:
    """Append sequences; returns how many end-of-document ids they hold.

    A document that a border cuts becomes two. Empty documents are kept, but not at a border.
    """
    boundaries = np.array(data.document_indices)  # aligned: a search in the map would copy it all
    eods = 0
    for start in range(chosen.start, chosen.stop, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, chosen.stop)
        lengths = data.sequence_lengths[start:stop].astype(np.int64)
        tokens = np.empty(int(lengths.sum()), data.dtype)
        data.gather(np.arange(start, stop), np.zeros(stop - start, np.int64), lengths, tokens)
        if eod is not None:
            eods += int(np.count_nonzero(tokens == eod))
        ends = np.cumsum(lengths)
        for number, (end, length) in enumerate(
            zip(ends.tolist(), lengths.tolist(), strict=True), start + 1
        ):
            builder.add_item(tokens[end - length : end])
            closed = np.searchsorted(boundaries, number, "right")
            closes = int(closed - np.searchsorted(boundaries, number, "left"))
            for _ in range(1 if number == chosen.stop else closes):
                builder.end_document()
    return eods


def _part_meta(
    meta: CorpusMeta | None, data: IndexedDataset, chosen: range, eods: int
) -> CorpusMeta | None:
    if meta is None:
        return None
    boundaries = data.document_indices
    inside = boundaries[(boundaries > chosen.start) & (boundaries < chosen.stop)]
    ends = np.append(inside, chosen.stop)
    starts = np.append(chosen.start, inside)
    lengths = data.sequence_lengths[chosen.start : chosen.stop]
    return dataclasses.replace(
        meta,
        documents=len(ends),
        empty_documents=int(np.count_nonzero(ends == starts)),
        sequences=len(chosen),
        tokens=int(lengths.sum(dtype=np.int64)),
        eod_tokens=eods,
        faulty_records=0,
    )


def _finish(builder: IndexedDatasetBuilder, prefix: str, meta: CorpusMeta | None) -> None:
    seal_corpus(builder, prefix, meta)
    publish_corpus(prefix, has_meta=meta is not None)


def _refuse_overwriting(output: str, inputs: Sequence[str]) -> None:
    if os.path.realpath(output) in map(os.path.realpath, inputs):
        raise DataError(f"the output {output} is one of the inputs; choose another name")
    os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
