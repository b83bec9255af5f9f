"""Signals and deaths of other processes, noted by a thread while the main thread computes.

This module loads no torch, so that a program can install the watch before that import, which takes
seconds. Signals are read from the pipe that the interpreter writes them to at once: the thread sees
them while the main thread is inside a collective, where no Python handler would run.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, MethodType

from mcore.log import report_error
from mcore.notice import Notice, open_notice, own_notice

#: Save and leave: what a scheduler, torchrun, Ctrl-C, a closed terminal and Slurm's users send.
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
SAVE_SIGNAL = signal.SIGUSR1

#: A scheduler signals workers and launcher, and the launcher its workers: that is one wish, not
#: two. A repetition after this time means: leave at once. A loaded launcher takes seconds to pass a
#: signal on.
_REPEAT_SECONDS = 5.0
_TICK_SECONDS = 0.5
#: A rank whose neighbour has died gets so long to find out and say so itself.
_GRACE_SECONDS = 10.0
#: The notice of a rank that ends since another one has: that is the one to look for.
_FOLLOWS = "has lost a peer"


class SignalWatch:
    """What signals have asked for, until the training loop asks.

    A signal that the process ignores (`nohup`, background jobs of a shell) stays ignored. Made by
    `install`, in the main thread.

    Attributes:
        started: `time.monotonic()` when the watch began, near the start of the process.
        notice: what this process is doing; the others repeat it should this one die.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._exit: int | None = None
        self._exit_time = 0.0
        self._save = False
        self._save_means_exit = False
        self._parent = os.getppid()
        self._follows_parent = False
        self.notice = own_notice()
        self._rank: int | None = None
        self._peers: dict[int, int] = {}
        self._notices: dict[int, Notice] = {}
        self._deadline: float | None = None
        self._reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (*EXIT_SIGNALS, SAVE_SIGNAL):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handler)
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="mcore-signals", daemon=True)
        self._thread.start()

    def _handler(self, number: int, frame: FrameType | None) -> None:
        """Nothing: the thread has read the number by now."""

    @property
    def exit_signal(self) -> int | None:
        """The signal that asked to save and leave, if one did."""
        return self._exit

    def take_save(self) -> bool:
        """Whether a save was asked for since the last call."""
        asked, self._save = self._save, False
        return asked

    def let_save_signal_exit(self) -> None:
        """From now on SIGUSR1 means save and leave too (`--exit-signal SIGUSR1`)."""
        self._save_means_exit = True
        if self.take_save():
            self._ask_to_leave(SAVE_SIGNAL)

    def let_signals_kill(self) -> None:
        """Give the exit signals their default action back, and act on one that came already.

        Call it in the main thread.
        """
        for number in EXIT_SIGNALS:
            if signal.getsignal(number) == self._handler:
                signal.signal(number, signal.SIG_DFL)
        asked, self._exit = self._exit, None
        if asked is not None:
            signal.raise_signal(asked)

    def follow_launcher(self) -> None:
        """End this process when the process that started it ends."""
        self._follows_parent = True

    def watch_peers(self, workers: Mapping[int, tuple[int, str]]) -> None:
        """Leave when another rank on this machine has died, should the main thread not notice.

        Args:
            workers: rank -> process and where its notice is. Processes that this one's parent has
                not started are left out: they may be seen under other numbers.
        """
        near = {
            rank: (pid, open_notice(address))
            for rank, (pid, address) in workers.items()
            if pid != os.getpid() and _is_sibling(pid)
        }
        self._rank = next((r for r, (pid, _) in workers.items() if pid == os.getpid()), None)
        self._notices = {rank: notice for rank, (_, notice) in near.items()}
        self._peers = {rank: pid for rank, (pid, _) in near.items()}

    def follow_peer(self) -> None:
        """This process is about to end since another one has: nobody need look for its reason."""
        self.notice.write(_FOLLOWS)

    def ignore_peers(self) -> None:
        """From now on other ranks may end: the run is over."""
        self._peers = {}

    def end(self) -> None:
        """The run is over: signals have their default action again, and the thread ends.

        An interpreter that ends would tear the thread out of what it does.
        """
        self._exit = None
        self.let_signals_kill()
        signal.signal(SAVE_SIGNAL, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        self._ended = True
        self._writer.send(b"\0")
        self._thread.join()

    def dead_peers(self) -> list[int]:
        """Ranks on this machine whose process has ended."""
        return [rank for rank, pid in self._peers.items() if not _is_alive(pid)]

    def account_of_peers(self, seconds: float = 0.0) -> str:
        """Ranks on this machine that have died of themselves or are stopped, and in what.

        Args:
            seconds: to wait for such a rank, for a connection ends a moment before its process.
        """
        end = time.monotonic() + seconds
        while not (account := self._account()) and time.monotonic() < end:
            time.sleep(0.05)
        return account

    def _account(self) -> str:
        parts = []
        for rank, pid in self._peers.items():
            said, stat = self._notices[rank].read(), _stat(pid)
            is_stopped = stat is not None and stat[0] in "Tt"
            if said != _FOLLOWS and (is_stopped or not _is_alive(pid)):
                state = "is stopped" if is_stopped else "has died"
                parts.append(f"rank {rank} (process {pid}) {state} {said}".rstrip())
        return "; ".join(parts)

    def _run(self) -> None:
        while not self._ended:
            ready, _, _ = select.select([self._reader], [], [], _TICK_SECONDS)
            if ready:
                for number in self._reader.recv(64):
                    self._note(number)
            if self._follows_parent and os.getppid() != self._parent:
                report_error("the launcher has ended; so does this worker")
                os._exit(1)
            if self._peers:
                self._look_at_peers()

    def _note(self, number: int) -> None:
        if number == SAVE_SIGNAL and not self._save_means_exit:
            self._save = True
        elif number in EXIT_SIGNALS or number == SAVE_SIGNAL:
            self._ask_to_leave(number)

    def _ask_to_leave(self, number: int) -> None:
        now = time.monotonic()
        if self._exit is None:
            self._exit, self._exit_time = number, now
        elif now - self._exit_time > _REPEAT_SECONDS and signal.getsignal(number) == self._handler:
            report_error(f"signal {signal.Signals(number).name} came again: leaving at once")
            os._exit(128 + number)

    def _look_at_peers(self) -> None:
        dead = self.dead_peers()
        if not dead:
            return
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + _GRACE_SECONDS
        # With a signal the launcher has told us: it knows of the death, and ends the job.
        if self._exit is not None or now > self._deadline:
            self._leave(dead)

    def _leave(self, dead: list[int]) -> None:
        """Say who has died doing what, and what this rank was doing meanwhile."""
        followers = ", ".join(f"rank {rank} (process {self._peers[rank]})" for rank in dead)
        deaths = self.account_of_peers() or f"{followers} has ended, having lost a peer"
        own, who = self.notice.read(), "" if self._rank is None else f"rank {self._rank}: "
        self.follow_peer()
        report_error(f"{who}{deaths}; leaving" + (f" (this rank was {own})" if own else ""))
        os._exit(1)


def install() -> SignalWatch | None:
    """The watch of this process, made now if there is none; None outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    for number in (SAVE_SIGNAL, *EXIT_SIGNALS):
        handler = signal.getsignal(number)
        if isinstance(handler, MethodType) and isinstance(handler.__self__, SignalWatch):
            return handler.__self__
    return SignalWatch()


def _stat(pid: int) -> list[str] | None:
    """State, parent, ... of a process as Linux tells them; None where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _is_sibling(pid: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    stat = _stat(pid)
    return stat is not None and int(stat[1]) == os.getppid()


def _is_alive(pid: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"
