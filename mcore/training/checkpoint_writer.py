"""How a run's checkpoints get written: at once or beside training, read back, old ones deleted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from mcore import checkpoint
from mcore.checkpoint import Aftercare, AsyncSaver, RankLocal, Retention, ShardedTensor
from mcore.config.checkpoint import CheckpointConfig
from mcore.log import get_logger

#: When training has failed, a write that is under way gets so long to end.
_LAST_WRITE_SECONDS = 60.0


class CheckpointWriter:
    """Writes the checkpoints of one run as its options say.

    Comm: the writer in the background has process groups of its own, made here; every rank of the
    job constructs it.

    Args:
        options: where, how often and how.
        timeout: how long a rank waits for the others' part of a save in the background; torch's
            default when None.
    """

    def __init__(self, options: CheckpointConfig, *, timeout: timedelta | None = None) -> None:
        self._options = options
        self._retention = _retention(options)
        self._damaged: set[int] = set()
        self._saver: AsyncSaver | None = None
        reads_back = options.verify_saved_checkpoint or self._retention.keep_latest == 1
        if options.save is not None and (options.async_save or reads_back):
            self._saver = AsyncSaver(timeout=timeout)

    def write(
        self,
        iteration: int,
        tensors: Mapping[str, ShardedTensor | Tensor],
        common: Mapping[str, Any],
        rank_local: RankLocal | None,
    ) -> None:
        """Write the checkpoint of an iteration, or begin to. Collective.

        Raises:
            CheckpointError: on every rank; this save failed, or the one before in the background.
        """
        root, saver = self._options.save, self._saver
        assert root is not None
        self._damaged.discard(iteration)
        aftercare = self._aftercare()
        if saver is not None and self._options.async_save:
            saver.save(root, iteration, tensors, common, rank_local=rank_local, aftercare=aftercare)
            get_logger().info("saving checkpoint of iteration %d to %s", iteration, root)
            return
        if saver is not None:
            saver.wait()
        path = checkpoint.save(
            root, iteration, tensors, common, rank_local=rank_local, settle=False
        )
        get_logger().info("saved checkpoint of iteration %d to %s", iteration, path)
        if saver is None:
            aftercare.apply(path)
        else:
            saver.start(lambda group: aftercare.apply(path, group))

    def found_damaged(self, directory: Path) -> None:
        """Take note that this checkpoint cannot be used: none before it goes because of it."""
        root = self._options.save
        if root is not None and directory.parent.resolve() == Path(root).resolve():
            self._damaged.add(checkpoint.iteration_of(directory))

    def _aftercare(self) -> Aftercare:
        retention = replace(self._retention, damaged=frozenset(self._damaged))
        return Aftercare(self._options.verify_saved_checkpoint, retention)

    def poll(self) -> None:
        """See to it that a failure in the background ends the run; once a step, collective.

        Raises:
            CheckpointError: the save failed; the same on every rank.
        """
        if self._saver is not None:
            self._saver.poll()

    def wait(self) -> None:
        """Wait for what is being written, so that it can be read. Collective.

        Raises:
            CheckpointError: the save failed; the same on every rank.
        """
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Wait for what is still being written. Collective.

        Raises:
            CheckpointError: the save failed; the same on every rank.
        """
        if self._saver is not None:
            self._saver.close()

    def abandon(self) -> None:
        """Training has failed: give a write that is under way a moment, and ask nobody."""
        if self._saver is not None:
            self._saver.drain(_LAST_WRITE_SECONDS)


def _retention(options: CheckpointConfig) -> Retention:
    if options.save_retain_interval is not None:
        return Retention(keep_latest=1, keep_every=options.save_retain_interval)
    return Retention(options.keep_latest, options.keep_every)
