"""What follows a save: the checkpoint is read back, and older ones are deleted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from mcore.checkpoint.commit import (
    POINTER_NAME,
    complete_iterations,
    delete_leftovers,
    point_to,
    take_back,
)
from mcore.checkpoint.reader import read_metadata
from mcore.checkpoint.retention import Retention
from mcore.checkpoint.together import process_group, rank_in, run_together
from mcore.checkpoint.verify import verify, verify_file
from mcore.errors import DamagedCheckpointError


@dataclass(frozen=True, slots=True)
class Aftercare:
    """What to do once a checkpoint exists.

    Attributes:
        verify: read every byte of it back. That is done all the same where it is about to be the
            only one.
        retention: which older ones stay.
    """

    verify: bool = False
    retention: Retention = field(default_factory=Retention)

    def apply(self, directory: Path, group: dist.ProcessGroup | None = None) -> None:
        """Verify, then delete older ones. Collective.

        Args:
            directory: of the checkpoint that was just written, by `save` without `settle` if what
                it replaced is to be gone back to.
            group: the ranks that wrote it, which share the reading; None = all ranks of the job,
                or this process alone.

        Comm: gathers over the group.

        Raises:
            DamagedCheckpointError: what was read is not what was written. The pointer then names
                the checkpoint before, or what was written of this iteration before is back, and
                nothing was deleted.
            CheckpointError: the disk refuses.
        """
        group = process_group(group)
        iteration, is_last = run_together(group, lambda: self._look(directory, group))[0]
        if self.verify or is_last:
            try:
                run_together(group, lambda: _read_back(directory, group))
            except DamagedCheckpointError:
                if rank_in(group) == 0:
                    self._go_back(directory, iteration)
                raise
        run_together(group, lambda: self._delete(directory, iteration, group))

    def _look(self, directory: Path, group: dist.ProcessGroup | None) -> tuple[int, bool]:
        """The iteration, and whether no other checkpoint will be left; the first rank looks."""
        if rank_in(group) != 0:
            return 0, False
        iteration = read_metadata(directory).iteration
        return iteration, self.retention.leaves_one(directory.parent, iteration)

    def _delete(self, directory: Path, iteration: int, group: dist.ProcessGroup | None) -> None:
        if rank_in(group) == 0:
            delete_leftovers(directory, read_metadata(directory).files)
            self.retention.apply(directory.parent, iteration)

    def _go_back(self, directory: Path, iteration: int) -> None:
        """To what was written of this iteration before, if that is good, or to the one before."""
        if take_back(directory) and not verify(directory):
            return
        root, damaged = directory.parent, self.retention.damaged
        older = [n for n in complete_iterations(root) if n < iteration and n not in damaged]
        if older:
            point_to(root, older[-1])
        else:
            (root / POINTER_NAME).unlink(missing_ok=True)


def _read_back(directory: Path, group: dist.ProcessGroup | None) -> None:
    """Check this rank's share of the files."""
    metadata = read_metadata(directory)
    size = 1 if group is None else dist.get_world_size(group)
    share = sorted(metadata.files)[rank_in(group) :: size]
    problems = [text for name in share for text in verify_file(directory, metadata, name)]
    if problems:
        raise DamagedCheckpointError(
            "the checkpoint that was just saved is not on the disk as it was written: "
            + "; ".join(problems)
        )
