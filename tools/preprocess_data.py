"""Turn text into the indexed token files (.bin and .idx) that training reads.

The input is JSON lines, text or Parquet (see `corpus_reading`). For each `--json-keys` name K the
files are OUTPUT-PREFIX_K_document.bin and .idx (_sentence with --split-sentences), byte for byte
those of Megatron's tool and the same for any number of workers, and .meta.json beside them. They
appear when all is written; a run that fails leaves none. After a kill the same command goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import numpy as np

from mcore.config.command_line import StrictParser, add_flags, take_config
from mcore.config.fields import flag
from mcore.config.tokenizer import TokenizerConfig
from mcore.data.corpus_meta import CorpusMeta, meta_path
from mcore.data.indexed_builder import BuilderState, IndexedDatasetBuilder
from mcore.data.indexed_format import DType
from mcore.errors import ConfigError, DataError, McoreError
from mcore.tokenizers import Tokenizer, encode_texts, fingerprint
from tools.corpus_encoding import (
    EncodedChunk,
    EncodedPart,
    EncodeJob,
    cached_tokenizer,
    encode_in_order,
)
from tools.corpus_reading import STDIN, Chunk, Place, expand_inputs, read_chunks
from tools.preprocess_state import Counts, State, StateFile
from tools.sentence_splitting import build_splitter

BYTES_WORTH_A_WORKER = 1 << 24  # below this a further process takes longer to start than it saves
FAULTS_SHOWN = 100

REFUSED_FLAGS = {
    "--find-optimal-num-workers": "leave --workers out, and all cores are used",
    "--workers-to-check": "it belongs to --find-optimal-num-workers, which is not offered",
    "--max-documents": "it belongs to --find-optimal-num-workers, which is not offered",
    "--performance-dir": "it belongs to --find-optimal-num-workers, which is not offered",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessOptions:
    """Input, output and run time of the tool; the tokenizer has its own configuration."""

    input: tuple[str, ...] = flag(
        help="Files of JSON lines, .txt or .parquet, plain or packed (gz, bz2, xz, zst), in the "
        "order given; a quoted pattern stands for its files in sorted order, - for standard input.",
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
    split_sentences: bool = flag(
        False, help="Make every sentence a sequence of its own; the files end in _sentence."
    )
    keep_newlines: bool = flag(
        False, help="With --split-sentences: keep the white space between sentences."
    )
    lang: str = flag(
        "english", help="With --split-sentences: language of NLTK's Punkt model, where installed."
    )
    txt_documents: Literal["file", "line"] = flag(
        "file", help="What a document of a .txt file is: the whole file, or each line."
    )
    on_bad_line: Literal["error", "skip"] = flag(
        "error", help="A record that cannot be used ends the run, or is named and left out."
    )
    state_interval: float = flag(
        60.0, help="Seconds between two points from which a killed run can go on; 0: none."
    )
    workers: int | None = flag(
        None, help="Number of processes. Default: all cores, or fewer where the input is small."
    )
    log_interval: int = flag(1000, help="Documents between two progress lines; 0: none.")
    dataset_impl: Literal["mmap", "lazy", "cached"] = flag(
        "mmap", help="Output format; there is mmap only, older names are accepted and say so."
    )
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
        for name in ("log_interval", "state_interval"):
            if getattr(self, name) < 0:
                spelled = "--" + name.replace("_", "-")
                raise ConfigError(f"{spelled} is {getattr(self, name)}; it cannot be negative")
        if self.keep_newlines and not self.split_sentences:
            raise ConfigError("--keep-newlines belongs to --split-sentences; give both or neither")
        if len(set(self.json_keys)) != len(self.json_keys):
            raise ConfigError(f"--json-keys names a key twice: {' '.join(self.json_keys)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """One pair of files, and what went into it."""

    prefix: str
    meta: CorpusMeta


def preprocess(options: PreprocessOptions, config: TokenizerConfig) -> list[Summary]:
    """Write the files of every key; see the module's docstring.

    Returns:
        One summary a key, in the order of `json_keys`.

    Raises:
        ConfigError: an end-of-document id is asked for that the tokenizer lacks.
        DataError: an input cannot be used; no output file is left.
    """
    return _Run(options, config).run()


class _Run:
    """One run of the tool."""

    def __init__(self, options: PreprocessOptions, config: TokenizerConfig) -> None:
        self.options, self.config = options, config
        self.paths = expand_inputs(options.input)
        self.tokenizer = cached_tokenizer(config)
        self.eod = _eod(self.tokenizer, options.append_eod)
        self.dtype = DType.optimal_dtype(self.tokenizer.vocab_size)
        self.splitter: str | None = None
        if options.split_sentences:
            _, self.splitter = build_splitter(options.lang, options.keep_newlines)
        self.job = EncodeJob(
            config,
            options.json_keys,
            options.append_eod,
            np.dtype(self.dtype).name,
            options.on_bad_line == "skip",
            options.lang if options.split_sentences else None,
            options.keep_newlines,
        )
        level = "sentence" if options.split_sentences else "document"
        self.prefixes = {
            key: f"{options.output_prefix}_{key}_{level}" for key in self.job.json_keys
        }
        self.counts = {key: Counts() for key in self.job.json_keys}
        self.faulty_records = 0

    def run(self) -> list[Summary]:
        os.makedirs(os.path.dirname(os.path.abspath(self.options.output_prefix)), exist_ok=True)
        encode_texts(self.tokenizer, [])  # warns here, once, where the fast way is closed
        state_file = StateFile(
            self.options.output_prefix,
            self.paths,
            [dataclasses.asdict(self.job), self.splitter, self.options.txt_documents],
        )
        state = state_file.read()
        if state is not None:
            self.counts, self.faulty_records = state.counts, state.faulty_records
            where = self.paths[state.place.file]
            _note(f"an interrupted run goes on at {where}, line {state.place.line}")
        with contextlib.ExitStack() as stack:
            stack.callback(state_file.remove)
            builders = {
                key: stack.enter_context(self._builder(key, state)) for key in self.prefixes
            }
            try:
                self._encode(builders, state, state_file)
            except KeyboardInterrupt:
                for builder in builders.values():
                    builder.suspend()
                stack.pop_all()
                raise
            self._refuse_empty()
            return [self._finish(key, builder) for key, builder in builders.items()]

    def _builder(self, key: str, state: State | None) -> IndexedDatasetBuilder:
        resume: BuilderState | None = None if state is None else state.builders[key]
        return IndexedDatasetBuilder(self.prefixes[key] + ".bin", self.dtype, resume=resume)

    def _encode(
        self,
        builders: dict[str, IndexedDatasetBuilder],
        state: State | None,
        state_file: StateFile,
    ) -> None:
        options = self.options
        start = None if state is None else state.place
        chunks = read_chunks(self.paths, options.json_keys, options.txt_documents, start)
        progress = _Progress(options.log_interval, self.paths, start)
        saved = time.monotonic()
        workers = options.workers or _default_workers(self.paths)
        for chunk, encoded in encode_in_order(self.job, chunks, workers):
            for key, part in encoded.parts.items():
                builders[key].add_documents(*part)
                _count(self.counts[key], part, self.eod)
            self._report_faults(encoded)
            progress.add(chunk, encoded)
            if options.state_interval and time.monotonic() - saved >= options.state_interval:
                states = {key: builder.save_state() for key, builder in builders.items()}
                state_file.write(State(chunk.after, states, self.counts, self.faulty_records))
                saved = time.monotonic()

    def _report_faults(self, encoded: EncodedChunk) -> None:
        for fault in encoded.faults:
            self.faulty_records += 1
            if self.faulty_records <= FAULTS_SHOWN:
                _warn(f"left out: {fault}")
            elif self.faulty_records == FAULTS_SHOWN + 1:
                _warn("further records that are left out are only counted")

    def _refuse_empty(self) -> None:
        for key, counts in self.counts.items():
            if counts.tokens == 0:
                raise DataError(
                    f"key {key!r}: not one token in the {counts.documents} documents of the input; "
                    "nothing is written"
                )

    def _finish(self, key: str, builder: IndexedDatasetBuilder) -> Summary:
        prefix, counts = self.prefixes[key], self.counts[key]
        with contextlib.suppress(FileNotFoundError):
            os.remove(meta_path(prefix))  # it is of the files that are replaced now
        sequences = builder.num_sequences
        builder.finalize(prefix + ".idx")
        assert self.config.tokenizer_type is not None
        meta = CorpusMeta(
            tokenizer_type=self.config.tokenizer_type,
            tokenizer_fingerprint=fingerprint(self.tokenizer),
            vocab_size=self.tokenizer.vocab_size,
            eod_id=self.eod,
            append_eod=self.options.append_eod,
            dtype=np.dtype(self.dtype).name,
            documents=counts.documents,
            empty_documents=counts.empty_documents,
            sequences=sequences,
            tokens=counts.tokens,
            eod_tokens=counts.eod_tokens,
            faulty_records=self.faulty_records,
            sentence_splitter=self.splitter,
        )
        meta.write(prefix)
        return Summary(prefix, meta)


def _eod(tokenizer: Tokenizer, needed: bool) -> int | None:
    try:
        return tokenizer.eod
    except ConfigError as error:
        if needed:
            raise ConfigError(f"--append-eod: {error}") from error
        return None


def _default_workers(paths: Sequence[str]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if paths == [STDIN]:
        return cores or 1
    worthwhile = 1 + sum(map(os.path.getsize, paths)) // BYTES_WORTH_A_WORKER
    return min(cores or 1, worthwhile)


def _count(counts: Counts, part: EncodedPart, eod: int | None) -> None:
    counts.documents += len(part.sequence_counts)
    counts.empty_documents += int(np.count_nonzero(part.sequence_counts == 0))
    counts.tokens += len(part.tokens)
    if eod is not None:
        counts.eod_tokens += int(np.count_nonzero(part.tokens == eod))


class _Progress:
    """A line on stderr every so many documents."""

    def __init__(self, interval: int, paths: Sequence[str], start: Place | None) -> None:
        self._interval = interval
        self._start = time.monotonic()
        self._documents = self._tokens = self._bytes = 0
        sizes = [0 if path == STDIN else os.path.getsize(path) for path in paths]
        self._before = dict(zip(paths, np.cumsum([0, *sizes]).tolist(), strict=False))
        self._total = sum(sizes)
        self._skipped = None if start is None else self._before[paths[start.file]] + start.offset

    def add(self, chunk: Chunk, encoded: EncodedChunk) -> None:
        part = next(iter(encoded.parts.values()))
        before, self._documents = self._documents, self._documents + len(part.sequence_counts)
        self._tokens += sum(len(part.tokens) for part in encoded.parts.values())
        self._bytes += encoded.text_bytes
        if self._interval and before // self._interval < self._documents // self._interval:
            seconds = max(time.monotonic() - self._start, 1e-9)
            print(
                f"Processed {self._documents} documents ({self._documents / seconds:.1f} docs/s, "
                f"{self._bytes / seconds / 2**20:.2f} MB/s, {self._tokens / seconds:.0f} tokens/s)"
                f"{self._remaining(chunk, seconds)}.",
                file=sys.stderr,
            )

    def _remaining(self, chunk: Chunk, seconds: float) -> str:
        if not self._total:
            return ""
        done = self._before[chunk.path] + chunk.stored
        read = max(done - (self._skipped or 0), 1)
        left = timedelta(seconds=round(seconds * max(self._total - done, 0) / read))
        return f", {100 * done / self._total:.0f}% of the input, ETA {left}"


def _report(outputs: list[Summary]) -> None:
    for output in outputs:
        meta = output.meta
        print(f"{output.prefix}.bin, .idx and .meta.json:")
        print(f"  documents: {meta.documents} ({meta.empty_documents} empty)")
        print(f"  tokens: {meta.tokens} ({meta.dtype})")
        eod = "none" if meta.eod_id is None else meta.eod_id
        print(f"  EOD id: {eod}, EOD tokens: {meta.eod_tokens}")
        if meta.sentence_splitter is not None:
            print(f"  sentences: {meta.sequences}, split by {meta.sentence_splitter}")
        if meta.faulty_records:
            print(f"  records left out: {meta.faulty_records}")
    if not outputs[0].meta.append_eod:
        _warn("--append-eod is absent: nothing in the data marks where a document ends")


def _note(message: str) -> None:
    print(f"note: {message}", file=sys.stderr)


def _warn(message: str) -> None:
    print(f"WARNING: {message}", file=sys.stderr)


def _parser() -> StrictParser:
    parser = StrictParser(
        refused=REFUSED_FLAGS,
        prog="preprocess_data.py",
        usage="%(prog)s --input FILE [FILE ...] --output-prefix PATH --tokenizer-type TYPE [...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the tool's flags to a parser."""
    add_flags(parser.add_argument_group("data"), PreprocessOptions)
    add_flags(parser.add_argument_group("tokenizer"), TokenizerConfig)


def _options(namespace: argparse.Namespace) -> tuple[PreprocessOptions, TokenizerConfig]:
    return take_config(PreprocessOptions, namespace), take_config(TokenizerConfig, namespace)


def run_arguments(namespace: argparse.Namespace) -> int:
    """Run what the flags of `add_arguments` say; returns the exit status 0.

    Raises:
        McoreError: see `preprocess`.
    """
    options, config = _options(namespace)
    if options.partitions > 1:
        _note("--partitions needs nothing: --workers sets the processes, and the order is kept")
    if options.dataset_impl != "mmap":
        _note(f"--dataset-impl {options.dataset_impl} has no effect: files are of the mmap kind")
    _report(preprocess(options, config))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status: 0 done, 1 the data or files are at fault, 2 usage."""
    parser = _parser()
    try:
        namespace = parser.parse_args(argv)
        _options(namespace)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return run_arguments(namespace)
    except (McoreError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
