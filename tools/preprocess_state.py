"""Where an interrupted preprocessing run can go on: `OUTPUT-PREFIX.preprocess_state.json`.

It is written from time to time, after the temporary output files have reached the disk, once more
when all of them are complete and only their names are missing, and removed when they have them. A
run that was killed leaves it; the same command then continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from mcore.data.indexed_builder import BuilderState
from mcore.log import get_logger
from tools.corpus_reading import STDIN, CutShortError, Place


@dataclasses.dataclass(slots=True)
class Counts:
    """What went into one pair of files."""

    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    eod_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """A point that a run has passed.

    Attributes:
        place: where in the input it goes on.
        builders: for each key, what its files hold.
        counts: for each key, what was counted.
        faulty_records: records left out.
        is_sealed: all output is complete under its temporary names; nothing is left to read.
    """

    place: Place
    builders: dict[str, BuilderState]
    counts: dict[str, Counts]
    faulty_records: int
    is_sealed: bool = False


class StateFile:
    """Reads and writes the state of one command.

    Args:
        output_prefix: the command's.
        inputs: input files; a change of one makes an old state useless.
        tokenizer_files: files that the tokenizer is read from; so does a change of one of these.
        options: all that the output depends on, as plain values.
    """

    def __init__(
        self,
        output_prefix: str,
        inputs: Sequence[str],
        tokenizer_files: Sequence[str],
        options: Any,
    ) -> None:
        self.path = output_prefix + ".preprocess_state.json"
        self._can_resume = STDIN not in inputs
        files = [(path, _stamp(path)) for path in inputs if path != STDIN]
        tokenizer = [(path, _digest(path)) for path in tokenizer_files]
        text = json.dumps([files, tokenizer, options], sort_keys=True)
        self._job = hashlib.sha256(text.encode()).hexdigest()

    def read(self) -> State | None:
        """The state of an interrupted run of this very command, or None."""
        if not self._can_resume or not os.path.exists(self.path):
            return None
        try:
            with open(self.path, encoding="utf-8") as file:
                values = json.load(file)
            if values["job"] != self._job:
                return None
            return State(
                Place(*values["place"]),
                {key: BuilderState(*state) for key, state in values["builders"].items()},
                {key: Counts(**counts) for key, counts in values["counts"].items()},
                values["faulty_records"],
                values["is_sealed"],
            )
        except (ValueError, KeyError, TypeError):
            return None

    def write(self, state: State) -> None:
        """Note a state, whole or not at all."""
        if not self._can_resume:
            return
        values = {
            "job": self._job,
            "place": state.place,
            "builders": state.builders,
            "counts": {key: dataclasses.asdict(counts) for key, counts in state.counts.items()},
            "faulty_records": state.faulty_records,
            "is_sealed": state.is_sealed,
        }
        with open(self.path + ".partial", "w", encoding="utf-8") as file:
            json.dump(values, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.path + ".partial", self.path)

    def exists(self) -> bool:
        """A state is noted, from which the same command can go on."""
        return os.path.exists(self.path)

    def remove(self) -> None:
        """Forget what was noted."""
        if self.exists():
            os.remove(self.path)


@contextlib.contextmanager
def only_run(output_prefix: str) -> Iterator[None]:
    """Keep other runs away from an output prefix, by a lock on `OUTPUT-PREFIX.preprocess_lock`.

    The system frees it when the process ends, however it ends.

    Raises:
        CutShortError: another run has it.
    """
    path = output_prefix + ".preprocess_lock"
    with _locked(path) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            os.remove(path)


def _locked(path: str) -> TextIO:
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  (the caller closes it)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            with file:
                raise CutShortError(
                    f"another run ({file.read()}) is writing this output ({path} is locked); wait "
                    "for its end, stop it, or give another --output-prefix"
                ) from None
        except OSError as error:
            get_logger().warning("%s cannot be locked (%s): run one command at a time", path, error)
            return file
        with contextlib.suppress(FileNotFoundError):  # the run before has just removed it
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
