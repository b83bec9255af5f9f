"""Which checkpoints stay on disk, and how the others go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mcore.checkpoint.commit import (
    METADATA_NAME,
    REPLACED_NAME,
    SHARD_PATTERN,
    complete_iterations,
    iteration_directory,
    temporary_name,
    unfinished_iterations,
)
from mcore.checkpoint.reader import read_metadata
from mcore.checkpoint.shard_reader import ShardReader
from mcore.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Retention:
    """What to keep after a save.

    Attributes:
        keep_latest: how many of the newest checkpoints; None = all of them, nothing is deleted.
        keep_every: iterations that are multiples of this stay for good; None = no such.
        damaged: iterations that were found damaged: they count for nothing, and go with the
            good ones before them.
    """

    keep_latest: int | None = None
    keep_every: int | None = None
    damaged: frozenset[int] = frozenset()

    def doomed(self, iterations: Iterable[int], saved: int) -> list[int]:
        """Which of the complete iterations go, after `saved` was written.

        Those beyond `saved` stay: they are of a branch that was left by `--ckpt-step`.
        """
        if self.keep_latest is None:
            return []
        older = sorted(iteration for iteration in iterations if iteration <= saved)
        good = [iteration for iteration in older if iteration not in self.damaged]
        first_kept = min(good[-self.keep_latest :], default=0)
        return [
            iteration
            for iteration in older
            if iteration < first_kept and (self.keep_every is None or iteration % self.keep_every)
        ]

    def leaves_one(self, root: Path, saved: int) -> bool:
        """Whether `apply` will delete checkpoints until that of `saved` is the only good one.

        Those beyond `saved` do not count: a run may have left them because they are damaged.
        """
        iterations = [number for number in complete_iterations(root) if number <= saved]
        doomed = self.doomed(iterations, saved)
        return bool(doomed) and {*iterations} - {*doomed} - self.damaged <= {saved}

    def apply(self, root: Path, saved: int) -> None:
        """Delete what is not kept, and the remains of saves that died before `saved`.

        Nothing goes unless the checkpoint of `saved` is complete and its files have their size.

        Raises:
            CheckpointError: the checkpoint of `saved` is damaged; nothing was deleted.
            OSError: the disk refuses.
        """
        if self.keep_latest is None:
            return
        directory = iteration_directory(root, saved)
        metadata = read_metadata(directory)
        ShardReader(directory, metadata.files).check_sizes(
            chunk for record in metadata.tensors.values() for chunk in record.chunks
        )
        for iteration in self.doomed(complete_iterations(root), saved):
            _delete(iteration_directory(root, iteration))
        for iteration in unfinished_iterations(root):
            if iteration < saved:
                _delete(iteration_directory(root, iteration))


def _delete(directory: Path) -> None:
    """Delete a checkpoint; files of others, and links, stay.

    Its `metadata.json` goes first, so that at any moment it is either whole or no checkpoint.
    """
    if directory.is_symlink():
        return
    names: set[str] = set()
    # A damaged or unfinished one names none; its shards are known by their pattern.
    with contextlib.suppress(CheckpointError):
        names.update(read_metadata(directory).files)
    (directory / METADATA_NAME).unlink(missing_ok=True)
    for entry in directory.iterdir():
        ours = entry.name in names or entry.match(SHARD_PATTERN)
        if ours and not entry.is_symlink():
            entry.unlink(missing_ok=True)
    for name in (REPLACED_NAME, *map(temporary_name, (METADATA_NAME, REPLACED_NAME))):
        (directory / name).unlink(missing_ok=True)
    if not any(directory.iterdir()):
        directory.rmdir()
