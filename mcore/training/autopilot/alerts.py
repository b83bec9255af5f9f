"""A user's command that is told what happens, and that training never waits for."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mcore.log import get_logger

#: Messages that may wait for their turn; further ones are dropped, with a word in the log.
_MAX_WAITING = 100


class Alerts:
    """Runs a shell command once a message, with the message's JSON on its standard input.

    Commands run one after the other, beside training. One that takes longer than the timeout is
    killed with all that it started; one that fails is named in the log. Neither touches training.

    Args:
        command: given to the shell.
        timeout: seconds that one run may take.
    """

    def __init__(self, command: str, timeout: float) -> None:
        self._command, self._timeout = command, timeout
        self._messages: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._is_closed = threading.Event()
        # A daemon: an interpreter that ends does not wait for it.
        self._thread = threading.Thread(target=self._work, name="mcore-alerts", daemon=True)
        self._thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Have the command run for a message, some time soon; returns at once."""
        try:
            self._messages.put_nowait(json.dumps(message))
        except queue.Full:
            get_logger().warning(
                "--on-alert: %d messages wait already; one was dropped", _MAX_WAITING
            )

    def close(self) -> None:
        """Wait until the messages sent are dealt with, for no longer than one timeout."""
        deadline = time.monotonic() + self._timeout
        with suppress(queue.Full):
            self._messages.put(None, timeout=self._timeout)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._is_closed.set()
            waiting = sum(message is not None for message in list(self._messages.queue))
            get_logger().warning(
                "--on-alert: the run ended while the command ran, and %d more messages were left",
                waiting,
            )

    def _work(self) -> None:
        while (message := self._messages.get()) is not None and not self._is_closed.is_set():
            problem = self._run(message)
            if problem is not None:
                get_logger().warning("--on-alert %s: %s", self._command, problem)

    def _run(self, message: str) -> str | None:
        """Run the command; what went wrong, in words."""
        try:
            process = subprocess.Popen(
                self._command,
                shell=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # so that all it starts can be ended with it
            )
        except OSError as error:
            return f"cannot be started: {error}"
        try:
            _, complaint = process.communicate(message + "\n", timeout=self._timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"was killed after {self._timeout:g} seconds"
        if process.returncode:
            return f"ended with code {process.returncode}: {complaint.strip()[-500:]}"
        return None
