"""Whole jobs killed while they save, again and again: none loses its pointer or its way."""

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore.checkpoint import complete_iterations, latest_iteration, verify
from mcore.checkpoint.commit import iteration_directory, point_to
from mcore.checkpoint.reader import read_metadata
from mcore.errors import CheckpointError
from tests.cli.jobs import LIMIT_SECONDS, Job, is_alive
from tests.equivalence.program import Layout, read_records, train, without_rates
from tests.equivalence.tiny import command

ROOT = Path(__file__).parents[2]
#: Saves that a job makes, at most, before it is killed.
SAVES = 3
INTERVAL = 2
ASYNC = "--async-save"
full = pytest.mark.full


def marker(shard):
    """What says that the save of a shard is complete: the metadata that names it."""
    try:
        return shard.name in read_metadata(shard.parent).files
    except CheckpointError:  # not there
        return False


def shards(root):
    """Those that are there; a directory may be deleted while it is looked through."""
    while True:
        try:
            return set(root.glob("iter_*/shard_*"))
        except FileNotFoundError:
            continue


class Killer:
    """Ends jobs by SIGKILL at random moments of saves: after the first byte, before the marker.

    Attributes:
        again: kills in the save of an iteration whose directory was there before.
        whole: those of them in the save of an iteration that was complete before.
        single: kills of one worker of several; the others were of whole jobs.
    """

    def __init__(self, seed):
        self.random, self.victims = random.Random(seed), random.Random(seed)
        self.again = self.whole = self.single = 0
        self._seconds = []

    def __call__(self, job, goes_back):
        """Kill a job in a save; False where it ended first.

        Args:
            job: that has just been started.
            goes_back: what it saves first was complete before, and that is when it is killed;
                otherwise some saves go by: two of the first job, so that it can be gone back.
        """
        folders = {path.name for path in job.save.glob("iter_*")}
        complete = set(complete_iterations(job.save))
        known = shards(job.save)
        left = self.random.randrange(SAVES) if self._seconds else SAVES - 1
        left = 0 if goes_back else left
        end = time.monotonic() + LIMIT_SECONDS
        while job.process.poll() is None:
            assert time.monotonic() < end, job.output.read_text()
            new = shards(job.save) - known
            if not new:
                time.sleep(0.0005)
                continue
            shard, start = next(iter(new)), time.monotonic()
            latest = 0.3 if goes_back else 0.9
            if not (left or self._ends_within(job, shard, self._moment(latest))) and self._kill(
                job, shard
            ):
                self.again += shard.parent.name in folders
                self.whole += int(shard.parent.name[5:]) in complete
                return True
            left = max(0, left - 1)  # one that was over too soon is not counted
            if not self._ends_within(job, shard, LIMIT_SECONDS):
                break
            self._seconds.append(time.monotonic() - start)
            known |= shards(job.save)
        return False

    def _moment(self, latest):
        """Seconds into a save, up to a part of what the last ones took."""
        return self.random.uniform(0.0, latest) * statistics.median(self._seconds[-3:])

    def _ends_within(self, job, shard, seconds):
        """Whether the save that has begun with a shard is complete before so many seconds pass."""
        start = time.monotonic()
        while job.process.poll() is None and time.monotonic() - start < seconds:
            if not shard.exists() or marker(shard):
                return True
            time.sleep(0.0005)
        return False

    def _kill(self, job, shard):
        """Kill the whole job, or one of several workers; False where the save has just ended.

        The workers stand still while that is looked at, however late this process gets its turn.
        """
        workers = job.pids
        send(signal.SIGSTOP, *workers)
        if not shard.exists() or marker(shard):
            send(signal.SIGCONT, *workers)
            return False
        victim = self.victims.choice([*workers, None, None]) if len(workers) > 1 else None
        if victim is not None:
            send(signal.SIGKILL, victim)
            send(signal.SIGCONT, *workers)
            self.single += 1
        else:
            send(signal.SIGKILL, *workers, job.process.pid)
            end = time.monotonic() + 90.0
            while any(map(is_alive, workers)):  # in the middle of a flush it takes a moment
                assert time.monotonic() < end
                time.sleep(0.01)
        assert job.wait(90.0) != 0
        return True


def send(number, *pids):
    """Signal processes, of which some may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.cli
@pytest.mark.parametrize(
    ("ranks", "background", "rounds"),
    [
        pytest.param(1, ASYNC, 2, marks=full),
        pytest.param(1, ASYNC, 20, marks=full),
        pytest.param(1, "", 20, marks=full),
        pytest.param(2, ASYNC, 8, marks=full),
        pytest.param(2, "", 8, marks=full),
    ],
)
def test_killed_at_any_moment_of_a_save(corpus, tmp_path, ranks, background, rounds):
    """Every other time an older checkpoint is gone back to first, whose successor is there."""
    iterations = 2 * (rounds + 4) * INTERVAL
    model = "--hidden-size 128 --hidden-dropout 0.1"
    words = command(corpus, iterations, model)
    saving = f"--save-interval {INTERVAL} --keep-latest 2 {background}".split()
    job, killer = Job(tmp_path, [*words, *saving], 0 if ranks == 1 else ranks), Killer(rounds)
    for number in range(rounds):
        complete = complete_iterations(job.save)
        goes_back = number % 2 == 1
        if goes_back:
            assert len(complete) > 1
            point_to(job.save, complete[0])
        before = latest_iteration(job.save)
        assert killer(job.start(), goes_back), job.output.read_text()
        assert ranks > 1 or "Traceback" not in job.output.read_text()
        pointer, complete = latest_iteration(job.save), complete_iterations(job.save)
        assert pointer is None or pointer in complete
        assert before is None or (pointer is not None and pointer >= before)
        for iteration in complete:
            assert verify(iteration_directory(job.save, iteration)) == []
    assert job.start().wait() == 0, job.output.read_text()
    assert latest_iteration(job.save) == iterations
    straight = train(words, Layout(dp=ranks))
    assert without_rates(read_records(tmp_path / "r.jsonl")) == without_rates(straight)
    print(
        f"{rounds} kills: {killer.again} again, {killer.whole} whole; {killer.single} of one worker"
    )
    if rounds > 4:
        assert ranks == 1 or 0 < killer.single < rounds
        assert killer.again
        assert killer.whole


@full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the size limit of files")
def test_a_disk_that_fills_up(corpus, tmp_path):
    """Files may not grow past half a checkpoint: the run ends with the reason, the older stays."""
    root = tmp_path / "save"
    train(command(corpus, 6, f"--save {root} --save-interval 2 --exit-interval 2"))
    size = max(path.stat().st_size for path in root.glob("iter_*/*.safetensors"))
    more = command(corpus, 6, f"--save {root} --load {root} --save-interval 2 --device cpu")
    limited = (
        "import resource, signal, runpy, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, {size // 2})); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    for background in ([], ["--async-save"]):
        done = subprocess.run(
            [sys.executable, "-c", limited, "pretrain_gpt.py", *more, *background],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode not in (0, -9)
        assert "File too large" in done.stderr + done.stdout
        assert latest_iteration(root) == 2
        assert verify(iteration_directory(root, 2)) == []
        assert complete_iterations(root) == [2]


def test_a_directory_that_is_a_file(corpus, tmp_path):
    """As after a mount that went away: one message, no traceback."""
    root = tmp_path / "save"
    root.write_text("not a directory")
    with pytest.raises(Exception, match=r"save"):
        train(command(corpus, 4, f"--save {root} --save-interval 2"))
