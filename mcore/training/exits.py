"""When a run saves out of turn, or leaves before its end: agreed on by all ranks."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import torch

from mcore.config.run import RunConfig
from mcore.log import get_logger
from mcore.signals import SAVE_SIGNAL, SignalWatch
from mcore.topology.collectives import all_gather_object, all_reduce_
from mcore.training.initialize import Runtime

WORKER_PIDS = "worker.pids"


class Exits:
    """Asks all ranks whether one of them was told to save or to leave.

    Args:
        config: which signals count, and how long the run may last.
        runtime: whom to ask.
        watch: this process's signals; None = nobody installed it, and signals do what they do.

    Attributes:
        reason: why all ranks have agreed to leave, or None.
        has_moved: this process has made a step. Before that its time may be over without effect, so
            that a job which is started again and again gets on.
    """

    def __init__(self, config: RunConfig, runtime: Runtime, watch: SignalWatch | None) -> None:
        options = config.training
        self._host = runtime.host
        self._watch = watch
        self._began = time.monotonic() if watch is None else watch.started
        minutes = options.exit_duration_in_mins
        self._duration = None if minutes is None else 60.0 * minutes
        self.reason: str | None = None
        self.has_moved = options.skip_train  # which makes none
        self._save = False
        if watch is None:
            return
        if not options.exit_signal_handler:
            watch.let_signals_kill()
        elif options.exit_signal == "SIGUSR1":
            watch.let_save_signal_exit()

    @property
    def leaving(self) -> bool:
        """Whether the job has agreed to leave."""
        return self.reason is not None

    def ask(self) -> bool:
        """Agree on whether to leave, and on whether to save; what was agreed on stays so.

        Returns:
            `leaving`, the same on all ranks.

        Comm: one all-reduce of three numbers over all ranks' hosts; the device is not asked.
        """
        number, save = 0, False
        if self._watch is not None:
            number, save = self._watch.exit_signal or 0, self._watch.take_save()
        late = self._duration is not None and time.monotonic() - self._began > self._duration
        late = late and self.has_moved
        own = torch.tensor([number, save, late], dtype=torch.int64, device="cpu")
        number, save, late = all_reduce_(own, self._host, "max").tolist()
        self._save = self._save or bool(save)
        if self.reason is None and number:
            self.reason = signal.Signals(number).name
        elif self.reason is None and late:
            self.reason = "--exit-duration-in-mins"
        return self.leaving

    def take_save(self) -> bool:
        """Whether all ranks have agreed to save since the last call."""
        agreed, self._save = self._save, False
        return agreed


def forget_workers(config: RunConfig, runtime: Runtime) -> None:
    """Take `SAVE/worker.pids` away as the run ends: the numbers may soon be other processes'."""
    if config.checkpoint.save is None or not runtime.host.is_first:
        return
    path = Path(config.checkpoint.save, WORKER_PIDS)
    # One that another job has written since, or cannot be read, is left alone.
    with suppress(OSError, UnicodeDecodeError):
        if path.read_text().split()[:1] == [str(os.getpid())]:
            path.unlink()


def tell_workers(config: RunConfig, runtime: Runtime, watch: SignalWatch | None) -> None:
    """Say which processes take signals, in the log and in `SAVE/worker.pids`; watch the others.

    The file has a process number a line, in the order of ranks; followed by the host's name where
    the job spans several.

    Comm: gathers host, process number and address of the notice of every rank.
    """
    address = "" if watch is None else watch.notice.address
    workers = all_gather_object((socket.gethostname(), os.getpid(), address), runtime.host)
    here = workers[runtime.host.rank][0]
    if watch is not None:
        watch.watch_peers(
            {rank: (pid, own) for rank, (host, pid, own) in enumerate(workers) if host == here}
        )
    if not runtime.host.is_first or watch is None:
        return
    get_logger().info(
        "rank 0 is process %d on %s: kill -%s %d to any one worker saves a checkpoint",
        workers[0][1],
        here,
        SAVE_SIGNAL.name.removeprefix("SIG"),
        workers[0][1],
    )
    if config.checkpoint.save is not None:
        several = len({host for host, *_ in workers}) > 1
        lines = [f"{pid} {host}" if several else str(pid) for host, pid, _ in workers]
        Path(config.checkpoint.save, WORKER_PIDS).write_text("\n".join(lines) + "\n")
