"""Turn text into the indexed token files (.bin and .idx) that training reads.

The input is JSON lines, text or Parquet (see `corpus_reading`). For each `--json-keys` name K the
files are OUTPUT-PREFIX_K_document.bin and .idx (_sentence with --split-sentences), byte for byte
those of Megatron's tool and the same for any number of workers, and .meta.json beside them. They
appear when all is written. A run whose input is at fault leaves none; one that was cut short by
anything else (a kill, a full disk, a lost worker) goes on with the same command.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np

from mcore.config.command_line import StrictParser, add_flags, take_config
from mcore.config.fields import flag
from mcore.config.tokenizer import TokenizerConfig
from mcore.data.corpus_meta import (
    CorpusMeta,
    meta_path,
    publish_corpus,
    read_meta,
    seal_corpus,
)
from mcore.data.indexed_builder import BuilderState, IndexedDatasetBuilder
from mcore.data.indexed_format import DType
from mcore.data.publishing import partial_path
from mcore.errors import ConfigError, DataError, McoreError
from mcore.tokenizers import TOKENIZER_FILE, Tokenizer, encode_texts, fingerprint
from tools.corpus_encoding import (
    EncodedChunk,
    EncodedPart,
    EncodeJob,
    cached_tokenizer,
    encode_in_order,
)
from tools.corpus_reading import (
    STDIN,
    CutShortError,
    Place,
    expand_inputs,
    read_chunks,
)
from tools.preprocess_progress import Progress
from tools.preprocess_state import Counts, State, StateFile, only_run
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
        CutShortError, WorkerLostError: something else ended the run; the same call goes on from the
            last state.
    """
    return _Run(options, config).run()


class _LostFilesError(CutShortError):
    """The temporary files are not what the noted state says: the same command fails again."""


class _Run:
    """One run of the tool."""

    def __init__(self, options: PreprocessOptions, config: TokenizerConfig) -> None:
        self.options, self.config = options, config
        self.paths = expand_inputs(options.input)
        self.tokenizer = cached_tokenizer(config)
        self.fingerprint = fingerprint(self.tokenizer)
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
        with only_run(self.options.output_prefix):
            return self._run_alone()

    def _run_alone(self) -> list[Summary]:
        encode_texts(self.tokenizer, [])  # warns here, once, where the fast way is closed
        kind = [self.splitter, self.options.txt_documents, self.eod, self.fingerprint]
        state_file = StateFile(
            self.options.output_prefix,
            self.paths,
            _tokenizer_files(self.config),
            [dataclasses.asdict(self.job), *kind],
        )
        state = state_file.read()
        if state is None:
            if state_file.exists():
                _note(
                    "an interrupted run is begun again: its input, its tokenizer or its options "
                    "are not those of this command"
                )
            state_file.remove()  # its temporary files are replaced now
        if state is None or not state.is_sealed:
            self._write(state, state_file)
        for prefix in self.prefixes.values():
            publish_corpus(prefix, has_meta=True)
        state_file.remove()
        return [self._summary(prefix) for prefix in self.prefixes.values()]

    def _write(self, state: State | None, state_file: StateFile) -> None:
        """Everything that has to be written, under temporary names.

        What is done is removed where the input is at fault, so that it would be in vain. All else
        keeps it, as far as a state is noted: a full disk, a lost worker, a fault of the program.
        """
        builders: dict[str, IndexedDatasetBuilder] = {}
        try:
            self._open_builders(builders, state, state_file)
            self._encode(builders, state, state_file)
            self._refuse_empty()
            for key, builder in builders.items():
                seal_corpus(builder, self.prefixes[key], self._meta(key, builder))
            states = {key: builder.state for key, builder in builders.items()}
            end = Place(len(self.paths))
            state_file.write(State(end, states, self.counts, self.faulty_records, is_sealed=True))
        except DataError:
            self._discard(builders)
            state_file.remove()
            raise
        except BaseException as error:
            if not state_file.exists():
                self._discard(builders)
                raise
            for builder in builders.values():
                builder.suspend()
            if not isinstance(error, _LostFilesError):
                _note("what is done is kept; the same command goes on from there")
            raise

    def _open_builders(
        self,
        builders: dict[str, IndexedDatasetBuilder],
        state: State | None,
        state_file: StateFile,
    ) -> None:
        if state is not None:
            self.counts, self.faulty_records = state.counts, state.faulty_records
        for key, prefix in self.prefixes.items():
            resume: BuilderState | None = None if state is None else state.builders[key]
            try:
                builders[key] = IndexedDatasetBuilder(prefix + ".bin", self.dtype, resume=resume)
            except DataError as error:
                raise _LostFilesError(f"{error} (the record is {state_file.path})") from error
        if state is not None:
            where = self.paths[state.place.file]
            _note(f"an interrupted run goes on at {where}, line {state.place.line}")

    def _encode(
        self,
        builders: dict[str, IndexedDatasetBuilder],
        state: State | None,
        state_file: StateFile,
    ) -> None:
        options = self.options
        start = None if state is None else state.place
        chunks = read_chunks(self.paths, options.json_keys, options.txt_documents, start)
        progress = Progress(options.log_interval, self.paths, start)
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

    def _meta(self, key: str, builder: IndexedDatasetBuilder) -> CorpusMeta:
        counts = self.counts[key]
        assert self.config.tokenizer_type is not None
        return CorpusMeta(
            tokenizer_type=self.config.tokenizer_type,
            tokenizer_fingerprint=self.fingerprint,
            vocab_size=self.tokenizer.vocab_size,
            eod_id=self.eod,
            append_eod=self.options.append_eod,
            dtype=np.dtype(self.dtype).name,
            documents=counts.documents,
            empty_documents=counts.empty_documents,
            sequences=builder.state.sequences,
            tokens=counts.tokens,
            eod_tokens=counts.eod_tokens,
            faulty_records=self.faulty_records,
            sentence_splitter=self.splitter,
        )

    def _discard(self, builders: dict[str, IndexedDatasetBuilder]) -> None:
        for key, builder in builders.items():
            builder.discard()
            with contextlib.suppress(FileNotFoundError):
                os.remove(partial_path(meta_path(self.prefixes[key])))

    def _summary(self, prefix: str) -> Summary:
        meta = read_meta(prefix)
        if meta is None:
            raise CutShortError(f"{meta_path(prefix)} is gone; run the command again")
        return Summary(prefix, meta)


def _tokenizer_files(config: TokenizerConfig) -> list[str]:
    """What decides on the ids; special tokens beside it are in the tokenizer's fingerprint."""
    paths = filter(None, (config.vocab_file, config.merge_file, config.tokenizer_model))
    files = [os.path.join(path, TOKENIZER_FILE) if os.path.isdir(path) else path for path in paths]
    return [path for path in files if os.path.isfile(path)]


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
    """Run what the flags of `add_arguments` say; returns 0, or 130 after Ctrl-C.

    Raises:
        McoreError: see `preprocess`.
    """
    options, config = _options(namespace)
    if options.partitions > 1:
        _note("--partitions needs nothing: --workers sets the processes, and the order is kept")
    if options.dataset_impl != "mmap":
        _note(f"--dataset-impl {options.dataset_impl} has no effect: files are of the mmap kind")
    try:
        _report(preprocess(options, config))
    except KeyboardInterrupt:  # what is kept has been said
        return 128 + signal.SIGINT
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status.

    0 done, 1 the data or files are at fault, 2 usage, 130 Ctrl-C.
    """
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
