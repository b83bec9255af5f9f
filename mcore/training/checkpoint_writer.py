"""How a run's checkpoints get written: at once or beside training, read back, old ones deleted."""

from __future__ import annotations

from collections.abc import Mapping
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
        retention = _retention(options)
        self._aftercare = Aftercare(options.verify_saved_checkpoint, retention)
        self._saver: AsyncSaver | None = None
        reads_back = options.verify_saved_checkpoint or retention.keep_latest == 1
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
        if saver is not None and self._options.async_save:
            saver.save(
                root, iteration, tensors, common, rank_local=rank_local, aftercare=self._aftercare
            )
            get_logger().info("saving checkpoint of iteration %d to %s", iteration, root)
            return
        if saver is not None:
            saver.wait()
        path = checkpoint.save(
            root, iteration, tensors, common, rank_local=rank_local, settle=False
        )
        get_logger().info("saved checkpoint of iteration %d to %s", iteration, path)
        self._care(path)

    def _care(self, path: Path) -> None:
        if self._saver is None:
            self._aftercare.apply(path)
        else:
            self._saver.start(lambda group: self._aftercare.apply(path, group))

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
