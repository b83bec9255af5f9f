"""Saving while training goes on: a copy of the state, then a thread that writes it."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore.checkpoint.aftercare import Aftercare
from mcore.checkpoint.rank_local import RankLocal
from mcore.checkpoint.saver import save
from mcore.checkpoint.sharded_tensor import ShardedTensor
from mcore.checkpoint.staging import Staging
from mcore.checkpoint.together import as_checkpoint_error, process_group
from mcore.errors import CheckpointError
from mcore.log import get_logger
from mcore.topology.group import Group

Job = Callable[[dist.ProcessGroup | None], None]

#: After another rank's failure this one's thread gets so long to see it too.
_OWN_FAILURE_SECONDS = 30.0
#: How much less than training the thread asks of a processor that both want.
_NICENESS = 10


def _give_way() -> None:
    """Put this thread, and those that it starts to hash and flush, behind those of training."""
    if sys.platform.startswith("linux"):  # elsewhere threads have no niceness of their own
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + _NICENESS)


class AsyncSaver:
    """Writes checkpoints in a thread while the caller goes on training.

    `save` returns once the state is copied into host memory that all saves share. What is written
    is bit for bit what `mcore.checkpoint.save` would have written at that moment. One job runs at a
    time: a save that comes before the last one is written waits for it. A failure is raised by the
    next `poll`, `save`, `wait` or `close`, on every rank at the same call.

    The thread talks to the other ranks through gloo groups of its own, so nothing that training
    sends can meet it. Where processors are scarce it gives way to training. No process is forked.

    Args:
        group: ranks that save together; None = all ranks of the job, or this process alone where
            torch.distributed is not initialised.
        timeout: how long a rank waits for the others; torch's default when None.

    Comm: creates two process groups; every rank of the job has to construct it.
    """

    def __init__(
        self,
        group: Group | dist.ProcessGroup | None = None,
        *,
        timeout: timedelta | None = None,
    ) -> None:
        handle = process_group(group)
        self._writing: dist.ProcessGroup | None = None  # the thread's alone
        self._watching: dist.ProcessGroup | None = None  # the caller's alone
        if handle is not None:
            ranks = dist.get_process_group_ranks(handle)
            self._writing, self._watching = (
                dist.new_group(ranks, timeout, backend="gloo") for _ in range(2)
            )
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def staging_bytes(self) -> int:
        """Host memory that the copies take."""
        return self._staging.nbytes

    def save(
        self,
        root: str | os.PathLike[str],
        iteration: int,
        tensors: Mapping[str, ShardedTensor | Tensor],
        common: Mapping[str, Any],
        *,
        rank_local: RankLocal | None = None,
        aftercare: Aftercare | None = None,
    ) -> None:
        """Start saving; see `mcore.checkpoint.save` for the arguments. Collective.

        Args:
            root: save root.
            iteration: number of finished training iterations.
            tensors: what this rank holds.
            common: JSON state.
            rank_local: state of this rank alone.
            aftercare: what follows the save, in the thread as well.

        Raises:
            CheckpointError: the job before failed.
        """
        self.wait()
        names = {} if rank_local is None else dict(rank_local.tensors)
        staged = self._staging.copy(tensors)
        if rank_local is not None:
            own = {name: tensor.detach().cpu().clone() for name, tensor in names.items()}
            rank_local = replace(rank_local, tensors=own)
        state = copy.deepcopy(dict(common))

        def write(group: dist.ProcessGroup | None) -> None:
            path = save(
                root,
                iteration,
                staged,
                state,
                rank_local=rank_local,
                group=group,
                settle=aftercare is None,
            )
            if aftercare is not None:
                aftercare.apply(path, group)
            get_logger().info("saved checkpoint of iteration %d to %s", iteration, path)

        self.start(write)

    def start(self, job: Job) -> None:
        """Run a collective job in the thread; the group that it may use is given to it.

        Raises:
            CheckpointError: the job before failed.
        """
        self.wait()

        def run() -> None:
            try:
                _give_way()
                job(self._writing)
            except BaseException as error:  # noqa: BLE001  (raised where the caller looks next)
                self._failure = error

        # No daemon: an interpreter that ends waits for the write.
        self._thread = threading.Thread(target=run, name="checkpoint-writer")
        self._thread.start()

    def poll(self) -> bool:
        """Whether a job still runs somewhere. Collective while one runs; to be asked once a step.

        Raises:
            CheckpointError: the job failed, on whichever rank.
        """
        if self._thread is None:
            return False
        return self._agree(self._thread.is_alive())

    def wait(self) -> None:
        """Wait until the job has ended on all ranks. Collective while one runs.

        Raises:
            CheckpointError: the job failed, on whichever rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._agree(runs=False)

    def drain(self, seconds: float) -> None:
        """Let this rank's part of a write come to an end when training has failed; not collective.

        A write that is not done by then is left to die: it changes nothing.
        """
        if self._thread is not None:
            self._thread.join(seconds)
        if self._failure is not None:
            get_logger().error("the last checkpoint was not written: %s", self._failure)

    def close(self) -> None:
        """Wait, and free the groups. Collective.

        Raises:
            CheckpointError: the job failed, on whichever rank.
        """
        try:
            self.wait()
        finally:
            for group in (self._writing, self._watching):
                if group is not None:
                    dist.destroy_process_group(group)
            self._writing = self._watching = None

    def _agree(self, runs: bool) -> bool:
        """Tell all ranks of this one's job; the same verdict on all of them."""
        counts = torch.tensor([int(runs), int(self._failure is not None)], device="cpu")
        if self._watching is not None:
            dist.all_reduce(counts, group=self._watching)
        running, failed = counts.tolist()
        if failed:
            self._raise()
        if not running:
            self._thread = None
        return bool(running)

    def _raise(self) -> None:
        assert self._thread is not None
        self._thread.join(_OWN_FAILURE_SECONDS)
        failure, self._failure, self._thread = self._failure, None, None
        if failure is None:
            raise CheckpointError("saving the checkpoint failed on another rank")
        if isinstance(failure, (CheckpointError, OSError)):
            raise as_checkpoint_error(failure) from failure
        raise failure
