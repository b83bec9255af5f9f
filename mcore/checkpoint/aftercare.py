"""What follows a save: the checkpoint is read back, and older ones are deleted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from mcore.checkpoint.commit import POINTER_NAME, complete_iterations, point_to
from mcore.checkpoint.reader import read_metadata
from mcore.checkpoint.retention import Retention
from mcore.checkpoint.together import process_group, rank_in, run_together
from mcore.checkpoint.verify import verify_file
from mcore.errors import DamagedCheckpointError


@dataclass(frozen=True, slots=True)
class Aftercare:
    """What to do once a checkpoint exists.

    Attributes:
        verify: read every byte of it back.
        retention: which older ones stay.
    """

    verify: bool = False
    retention: Retention = field(default_factory=Retention)

    def apply(self, directory: Path, group: dist.ProcessGroup | None = None) -> None:
        """Verify, then delete older ones. Collective.

        Args:
            directory: of the checkpoint that was just written.
            group: the ranks that wrote it, which share the reading; None = all ranks of the job,
                or this process alone.

        Comm: gathers over the group.

        Raises:
            DamagedCheckpointError: what was read is not what was written. The pointer then names
                the checkpoint before, and nothing was deleted.
            CheckpointError: the disk refuses.
        """
        group = process_group(group)
        iteration = run_together(group, lambda: read_metadata(directory).iteration)[0]
        if self.verify:
            try:
                run_together(group, lambda: _read_back(directory, group))
            except DamagedCheckpointError:
                if rank_in(group) == 0:
                    _point_before(directory.parent, iteration)
                raise
        if self.retention.keep_latest is not None:
            run_together(group, lambda: self._delete(directory.parent, iteration, group))

    def _delete(self, root: Path, iteration: int, group: dist.ProcessGroup | None) -> None:
        if rank_in(group) == 0:
            self.retention.apply(root, iteration)


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


def _point_before(root: Path, iteration: int) -> None:
    older = [number for number in complete_iterations(root) if number < iteration]
    if older:
        point_to(root, older[-1])
    else:
        (root / POINTER_NAME).unlink(missing_ok=True)
