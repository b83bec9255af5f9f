"""The full-precision record of a run: one JSON object per line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore.errors import ConfigError, DataError


class RecordFile:
    """Appends objects to a JSON-lines file; a resumed run first drops what lies beyond its start.

    Numbers that are not finite are written as text (`plain`), so that every line is JSON.

    Args:
        path: the file; its directory is made if absent.
        iteration: finished iterations at the start; records beyond are dropped.
        measures_again: the run will measure the model of that iteration, whatever was measured
            before: records of evaluations at it are dropped too.

    Raises:
        ConfigError: the file cannot be written.
        DataError: a line that is not a record (other than a last line cut short by a kill).
    """

    def __init__(self, path: str, iteration: int, *, measures_again: bool = False) -> None:
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._keep_until(iteration, but_evaluations=measures_again)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--metrics-jsonl {path} cannot be written: {error}") from error

    def _keep_until(self, iteration: int, *, but_evaluations: bool = False) -> None:
        if not self._path.exists():
            return
        text = self._path.read_text(encoding="utf-8")
        lines = text.splitlines()
        kept = []
        for number, line in enumerate(lines, 1):
            may_be_cut = number == len(lines) and not text.endswith("\n")
            record = self._parse(line, number, may_be_cut)
            if record is None or record["iteration"] > iteration:
                continue
            is_last = record["iteration"] == iteration
            if not (but_evaluations and is_last and is_evaluation(record)):
                kept.append(line + "\n")
        if "".join(kept) == text:
            return
        shortened = self._path.with_name(self._path.name + ".tmp")
        shortened.write_text("".join(kept), encoding="utf-8")
        os.replace(shortened, self._path)

    def _parse(self, line: str, number: int, may_be_cut: bool) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("iteration"), int):
                return record
        except ValueError:
            if may_be_cut:
                return None  # cut short when the writer was killed
        raise DataError(
            f"{self._path} line {number} is not a record of a run; give --metrics-jsonl another "
            f"file"
        )

    def rewind(self, iteration: int) -> None:
        """Drop the records beyond an iteration, and go on after it."""
        self._file.close()
        self._keep_until(iteration)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object and hand it to the operating system."""
        self._file.write(json.dumps(plain(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Whether a record is of an evaluation rather than of a training step."""
    return any(name.endswith("_lm_loss") for name in record)


def plain(value: Any) -> Any:
    """JSON data with `"nan"`, `"inf"` and `"-inf"` in place of the numbers that JSON has not."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
