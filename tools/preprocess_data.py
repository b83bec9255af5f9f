"""Turn JSON lines of text into the indexed token files (.bin and .idx) that training reads.

One JSON object a line; the value of each `--json-keys` name is a text or a list of texts. For key K
the files are OUTPUT-PREFIX_K_document.bin and .idx, byte for byte those of Megatron's tool and the
same for any number of workers. They appear when all is written; a run that fails leaves none.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np

from mcore.config.command_line import StrictParser, add_flags, take_config
from mcore.config.fields import flag
from mcore.config.tokenizer import TokenizerConfig
from mcore.data.indexed_builder import IndexedDatasetBuilder
from mcore.data.indexed_format import DType
from mcore.errors import ConfigError, DataError, McoreError
from mcore.tokenizers import Tokenizer
from tools.corpus_encoding import (
    Chunk,
    EncodedChunk,
    EncodeJob,
    cached_tokenizer,
    encode_in_order,
    expand_inputs,
    read_chunks,
)

BYTES_WORTH_A_WORKER = 1 << 22  # below this a further process takes longer to start than it saves

REFUSED_FLAGS = {
    "--split-sentences": "a document is one sequence; put lists of sentences into the JSON instead",
    "--keep-newlines": "it belongs to --split-sentences, which is not offered",
    "--lang": "it belongs to --split-sentences, which is not offered",
    "--find-optimal-num-workers": "leave --workers out, and all cores are used",
    "--workers-to-check": "it belongs to --find-optimal-num-workers, which is not offered",
    "--max-documents": "it belongs to --find-optimal-num-workers, which is not offered",
    "--performance-dir": "it belongs to --find-optimal-num-workers, which is not offered",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessOptions:
    """Input, output and run time of the tool; the tokenizer has its own configuration."""

    input: tuple[str, ...] = flag(
        help="Files of JSON lines, plain or gzip, in the order given; a quoted pattern stands for "
        "its files in sorted order.",
        required=True,
        metavar="FILE",
    )
    output_prefix: str = flag(
        help="Path of the output files without _KEY_document.bin and .idx.",
        required=True,
        metavar="PATH",
    )
    json_keys: tuple[str, ...] = flag(
        ("text",), help="Keys of the JSON objects to tokenize, one pair of files each.", metavar="K"
    )
    append_eod: bool = flag(
        False, help="End every document that has tokens with the end-of-document id."
    )
    workers: int | None = flag(
        None, help="Number of processes. Default: all cores, or fewer where the input is small."
    )
    log_interval: int = flag(1000, help="Documents between two progress lines; 0: none.")
    dataset_impl: Literal["mmap"] = flag("mmap", help="Output format; there is this one only.")
    partitions: int = flag(
        1,
        help="Accepted for old command lines: --workers alone sets the processes, and the output "
        "is the same for any number of either.",
    )
    keep_sequential_samples: bool = flag(
        False, help="Accepted for old command lines: the order of the input is always kept."
    )

    def __post_init__(self) -> None:
        for name in ("workers", "partitions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name} is {value}; it must be at least 1")
        if self.log_interval < 0:
            raise ConfigError(f"--log-interval is {self.log_interval}; it cannot be negative")
        if len(set(self.json_keys)) != len(self.json_keys):
            raise ConfigError(f"--json-keys names a key twice: {' '.join(self.json_keys)}")


@dataclasses.dataclass(slots=True)
class Summary:
    """What went into one pair of files."""

    prefix: str
    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    eod_tokens: int = 0


def preprocess(options: PreprocessOptions, config: TokenizerConfig) -> list[Summary]:
    """Write the files of every key; see the module's docstring.

    Returns:
        One summary a key, in the order of `json_keys`.

    Raises:
        ConfigError: an end-of-document id is asked for that the tokenizer lacks.
        DataError: an input cannot be used; no output file is left.
    """
    paths = expand_inputs(options.input)
    tokenizer = cached_tokenizer(config)
    eod = _eod(tokenizer, options.append_eod)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    job = EncodeJob(config, options.json_keys, options.append_eod, np.dtype(dtype).name)
    os.makedirs(os.path.dirname(os.path.abspath(options.output_prefix)), exist_ok=True)

    outputs = {key: Summary(f"{options.output_prefix}_{key}_document") for key in job.json_keys}
    progress = _Progress(options.log_interval)
    with contextlib.ExitStack() as stack:
        builders = {
            key: stack.enter_context(IndexedDatasetBuilder(output.prefix + ".bin", dtype))
            for key, output in outputs.items()
        }
        workers = options.workers or _default_workers(paths)
        for chunk, encoded in encode_in_order(job, read_chunks(paths), workers):
            for key, part in encoded.items():
                _append(builders[key], part)
                _count(outputs[key], part, eod)
            progress.add(chunk, len(encoded[job.json_keys[0]].sequence_counts))
        _refuse_empty(outputs)
        for key, output in outputs.items():
            builders[key].finalize(output.prefix + ".idx")
    return list(outputs.values())


def _refuse_empty(outputs: dict[str, Summary]) -> None:
    for key, output in outputs.items():
        if output.tokens == 0:
            raise DataError(
                f"key {key!r}: not one token in the {output.documents} documents of the input; "
                "nothing is written"
            )


def _eod(tokenizer: Tokenizer, needed: bool) -> int | None:
    try:
        return tokenizer.eod
    except ConfigError as error:
        if needed:
            raise ConfigError(f"--append-eod: {error}") from error
        return None


def _default_workers(paths: Sequence[str]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    worthwhile = 1 + sum(map(os.path.getsize, paths)) // BYTES_WORTH_A_WORKER
    return min(cores or 1, worthwhile)


def _append(builder: IndexedDatasetBuilder, part: EncodedChunk) -> None:
    token, sequence = 0, 0
    for count in part.sequence_counts.tolist():
        lengths = part.sequence_lengths[sequence : sequence + count].tolist()
        end = token + sum(lengths)
        builder.add_document(part.tokens[token:end], lengths)
        token, sequence = end, sequence + count


def _count(summary: Summary, part: EncodedChunk, eod: int | None) -> None:
    summary.documents += len(part.sequence_counts)
    summary.empty_documents += int(np.count_nonzero(part.sequence_counts == 0))
    summary.tokens += len(part.tokens)
    if eod is not None:
        summary.eod_tokens += int(np.count_nonzero(part.tokens == eod))


class _Progress:
    """A line on stderr every so many documents."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._start = time.monotonic()
        self._documents = 0
        self._bytes = 0

    def add(self, chunk: Chunk, documents: int) -> None:
        before, self._documents = self._documents, self._documents + documents
        self._bytes += sum(map(len, chunk.lines))
        if self._interval and before // self._interval < self._documents // self._interval:
            seconds = max(time.monotonic() - self._start, 1e-9)
            print(
                f"Processed {self._documents} documents ({self._documents / seconds:.1f} docs/s, "
                f"{self._bytes / seconds / 2**20:.2f} MB/s).",
                file=sys.stderr,
            )


def _report(options: PreprocessOptions, config: TokenizerConfig, outputs: list[Summary]) -> None:
    tokenizer = cached_tokenizer(config)
    eod = _eod(tokenizer, needed=False)
    for output in outputs:
        print(f"{output.prefix}.bin and .idx:")
        print(f"  documents: {output.documents} ({output.empty_documents} empty)")
        print(f"  tokens: {output.tokens} ({np.dtype(DType.optimal_dtype(tokenizer.vocab_size))})")
        print(f"  EOD id: {'none' if eod is None else eod}, EOD tokens: {output.eod_tokens}")
    if not options.append_eod:
        _warn("--append-eod is absent: nothing in the data marks where a document ends")


def _warn(message: str) -> None:
    print(f"WARNING: {message}", file=sys.stderr)


def parse_arguments(argv: Sequence[str] | None) -> tuple[PreprocessOptions, TokenizerConfig]:
    """Read the command line.

    Raises:
        ConfigError: unknown, abbreviated or refused flags, or values that cannot be right.
    """
    parser = StrictParser(
        refused=REFUSED_FLAGS,
        prog="preprocess_data.py",
        usage="%(prog)s --input FILE [FILE ...] --output-prefix PATH --tokenizer-type TYPE [...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser.add_argument_group("data"), PreprocessOptions)
    add_flags(parser.add_argument_group("tokenizer"), TokenizerConfig)
    namespace = parser.parse_args(argv)
    return take_config(PreprocessOptions, namespace), take_config(TokenizerConfig, namespace)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status: 0 done, 1 the data or files are at fault, 2 usage."""
    try:
        options, config = parse_arguments(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.partitions > 1:
        _warn("--partitions has no effect: --workers alone sets the processes")
    try:
        outputs = preprocess(options, config)
    except (McoreError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _report(options, config, outputs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
