"""Whole jobs under torchrun, to be disturbed while they run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "pretrain_gpt.py"
LIMIT_SECONDS = 240.0

_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Job:
    """A job in a folder: its command, and what it has left there.

    Args:
        folder: where it runs; checkpoints are in `save`, records in `r.jsonl`.
        words: command line of pretrain_gpt.py, without files.
        size: processes; 0 = one process without torchrun.
        launcher: further words for torchrun.
        program: script that trains.
    """

    def __init__(self, folder, words, size, launcher=(), program=PROGRAM):
        self.folder = Path(folder)
        files = [
            "--save",
            "save",
            "--load",
            "save",
            "--metrics-jsonl",
            "r.jsonl",
            "--device",
            "cpu",
        ]
        never = ["--save-interval", "100000"]  # of itself
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        start = [*torchrun, *launcher] if size else []
        self.words = [sys.executable, *start, str(program), *never, *words, *files]
        self.process = None
        self.output = self.folder / "output.txt"
        self._seen = set()

    def start(self):
        self._seen.clear()
        for stale in (self.save / "worker.pids", self.output):
            stale.unlink(missing_ok=True)
        environment = {k: v for k, v in os.environ.items() if k not in _FOREIGN}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                self.words,
                cwd=self.folder,
                env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    @property
    def save(self):
        return self.folder / "save"

    @property
    def pointer(self):
        path = self.save / "latest_checkpointed_iteration.txt"
        return int(path.read_text()) if path.exists() else None

    @property
    def pids(self):
        """Of the workers, once all are written down."""
        try:
            text = (self.save / "worker.pids").read_text()
        except FileNotFoundError:  # not written yet, or the run has ended
            text = ""
        found = [int(word) for word in text.split()] if text.endswith("\n") else []
        self._seen.update(found)
        return found

    @property
    def iteration(self):
        """Of the last record that is written whole."""
        path = self.folder / "r.jsonl"
        return path.read_text().count('"lm_loss"') if path.exists() else 0

    def wait_until(self, condition, seconds=LIMIT_SECONDS, tick=0.005):
        """Wait for something to happen; a job in which it does not is killed."""
        end = time.monotonic() + seconds
        try:
            while not condition():
                assert self.process.poll() is None, self.output.read_text()
                assert time.monotonic() < end, self.output.read_text()
                time.sleep(tick)
        except BaseException:
            self.kill()
            raise

    def wait(self, seconds=LIMIT_SECONDS):
        """Wait for the end; no process of the job may be left then. Returns the exit code."""
        end = time.monotonic() + seconds
        try:
            while self.process.poll() is None and time.monotonic() < end:
                self._seen.update(self.pids)  # the file is gone at the end
                time.sleep(0.05)
            code = self.process.wait(1)
        finally:
            self.kill()
        left = [pid for pid in self._seen if is_alive(pid)]
        assert left == [], self.output.read_text()
        return code

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
