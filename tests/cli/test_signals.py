"""Signals and deaths at any moment: the job saves, leaves or starts again, and the numbers stay."""

import contextlib
import json
import os
import random
import re
import signal
import time
from collections import Counter

import pytest

from mcore.checkpoint import (
    CheckpointReader,
    complete_iterations,
    differences,
    read_common,
    verify,
)
from mcore.checkpoint.commit import iteration_directory
from tests.cli.jobs import Job
from tests.equivalence.faults import write_poisoned_corpus
from tests.equivalence.program import SINGLE, Layout, read_records, train, without_rates
from tests.equivalence.tiny import command

pytestmark = pytest.mark.cli

DROPOUT = "--hidden-dropout 0.1"


def assert_same_end(job, words, layout, iterations):
    """Records, weights, moments and schedules bit for bit those of an undisturbed run."""
    straight = job.folder / "straight"
    saves = ["--save-interval", "100000", *words, "--save", str(straight)]
    plain = without_rates(train([word for word in saves if word != "--async-save"], layout))
    assert without_rates(read_records(job.folder / "r.jsonl")) == plain
    last = [iteration_directory(root, iterations) for root in (job.save, straight)]
    assert list(differences(*map(CheckpointReader, last))) == []


def send(pid, number):
    """Signal a process that may have ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@pytest.mark.parametrize("layout", [SINGLE, pytest.param(Layout(tp=2), marks=pytest.mark.full)])
def test_one_save_on_the_way_and_one_before_leaving_then_the_same_command(corpus, tmp_path, layout):
    """SIGUSR1, then SIGTERM, to one worker: all save the same iteration, and exit with 0."""
    words = command(corpus, 200, DROPOUT, "--eval-interval 7 --eval-iters 1")
    size = layout.world_size if layout.world_size > 1 else 0
    job = Job(tmp_path, [*words, *layout.flags], size).start()
    job.wait_until(lambda: job.iteration >= 3 and len(job.pids) == layout.world_size)
    os.kill(job.pids[-1], signal.SIGUSR1)
    job.wait_until(lambda: job.pointer)
    saved = job.pointer
    job.wait_until(lambda: job.iteration > saved)
    os.kill(job.pids[-1], signal.SIGTERM)
    assert job.wait() == 0, job.output.read_text()
    assert not (job.save / "worker.pids").exists()
    assert complete_iterations(job.save) == [saved, job.pointer]
    assert saved < job.pointer == job.iteration < 200
    assert f"exiting at iteration {job.pointer} (SIGTERM)" in job.output.read_text()
    assert verify(iteration_directory(job.save, job.pointer)) == []
    assert job.start().wait(600) == 0, job.output.read_text()
    assert_same_end(job, words, layout, 200)


@pytest.mark.full
def test_torchrun_is_terminated_while_its_workers_evaluate(corpus, tmp_path):
    """The evaluation is broken off, and the resumed run makes up for it."""
    layout = Layout(dp=2)
    words = command(corpus, 6, DROPOUT, "--eval-interval 4 --eval-iters 300")
    job = Job(tmp_path, [*words, *layout.flags], 2).start()
    job.wait_until(lambda: job.iteration == 4)
    time.sleep(0.2)
    began = time.monotonic()
    os.kill(job.process.pid, signal.SIGTERM)
    job.wait()  # torchrun's own code, which is not 0
    assert time.monotonic() - began < 20
    assert job.pointer == 4
    assert [r for r in read_records(tmp_path / "r.jsonl") if "valid_lm_loss" in r] == []
    assert job.start().wait() == 0, job.output.read_text()
    assert_same_end(job, words, layout, 6)


@pytest.mark.full
def test_a_rank_of_four_is_killed_and_torchrun_starts_again(corpus, tmp_path):
    layout = Layout(tp=2, pp=2)
    words = command(corpus, 40, DROPOUT, "--save-interval 5")
    job = Job(tmp_path, [*words, *layout.flags], 4, ["--max-restarts", "3"]).start()
    job.wait_until(lambda: job.iteration >= 8 and len(job.pids) == 4)
    os.kill(job.pids[2], signal.SIGKILL)
    assert job.wait() == 0, job.output.read_text()
    assert re.search(r"error: rank \d: .*(rank 2|one of ranks \[.*2)", job.output.read_text())
    assert "loaded checkpoint" in job.output.read_text()
    assert_same_end(job, words, layout, 40)


#: Of a job that has rolled back and not saved since, one rank kills itself, once.
KILLED_AFTER_A_ROLLBACK = """
import os, signal
from pathlib import Path
from mcore import signals
if __name__ == "__main__":
    signals.install()
from mcore.training import pretrain
from mcore.training.gpt import datasets_provider, model_provider
from pretrain_gpt import forward_step

def killed_step(data_iterator, model):
    log, mark = Path("save/autopilot.jsonl"), Path("killed")
    if os.environ["RANK"] == "1" and data_iterator.iteration == 12 and not mark.exists():
        if '"rollback"' in log.read_text():
            mark.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
    return forward_step(data_iterator, model)

if __name__ == "__main__":
    pretrain(datasets_provider, model_provider, killed_step)
"""


@pytest.mark.full
def test_killed_between_a_rollback_and_the_next_save(tmp_path):
    """The restarted job meets the spike again, and passes over the same data."""
    layout = Layout(pp=2)
    poisoned = write_poisoned_corpus(tmp_path / "text_document")
    limits = (
        "--loss-spike-policy rollback --loss-spike-window 4 --loss-spike-min-samples 4 "
        "--loss-spike-threshold 3 --grad-norm-spike-min-factor 2 --save-interval 8"
    )
    words = command(poisoned, 12, DROPOUT, "--attention-dropout 0.1", limits)
    program = tmp_path / "program.py"
    program.write_text(KILLED_AFTER_A_ROLLBACK)
    job = Job(tmp_path, [*words, *layout.flags], 2, ["--max-restarts", "1"], program).start()
    assert job.wait() == 0, job.output.read_text()
    assert (tmp_path / "killed").exists()
    lines = (job.save / "autopilot.jsonl").read_text().splitlines()
    returns = [e for e in map(json.loads, lines) if e["event"] == "rollback"]
    assert [(e["iteration"], e["checkpoint"], e["passed_over"]) for e in returns] == [
        (11, 8, [9, 11])
    ] * 2
    assert_same_end(job, words, layout, 12)


@pytest.mark.full
def test_with_the_handler_off_a_signal_kills(corpus, tmp_path):
    job = Job(tmp_path, command(corpus, 500, "--no-exit-signal-handler"), 0).start()
    job.wait_until(lambda: job.iteration >= 2)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM
    assert job.pointer is None


#: What a moment is chosen by; the clock finds mostly the start.
MOMENTS = ["clock"] * 3 + ["training"] * 3 + ["evaluation"] * 2 + ["saving"] * 2

#: Signals that have to arrive in each phase, by what the job has left behind.
LEAST = {"training": 2, "evaluation": 1, "saving": 1}


EVALUATION, SAVE = 20, 25


def is_saving(job):
    """A checkpoint is due and not complete yet."""
    return (job.pointer or 0) < job.iteration // SAVE * SAVE


def await_moment(job, kind, generator):
    """Wait for a random moment of a kind; the whole run has to last for all of them."""
    first, seconds = job.iteration, generator.uniform(0.0, 12.0)
    begun, wanted = time.monotonic(), first + generator.randint(1, 20)
    conditions = {
        "clock": lambda: time.monotonic() > begun + seconds or job.iteration > first + 6,
        "training": lambda: job.iteration >= wanted,
        "evaluation": lambda: job.iteration > first and job.iteration % EVALUATION == 0,
        "saving": lambda: job.iteration > first and is_saving(job),
    }
    job.wait_until(conditions[kind])
    if kind == "training":
        time.sleep(generator.uniform(0.0, 0.1))


def phase(job, first, was_saving):
    """Where the signal fell: an evaluation that it broke off is owed to the next start."""
    if (job.pointer or 0) > first and read_common(job.save)["evaluation_is_owed"]:
        return "evaluation"
    if was_saving:
        return "saving"
    return "training" if job.iteration > first else "start"


@pytest.mark.full
@pytest.mark.parametrize("launcher", [True, False], ids=["torchrun", "worker"])
@pytest.mark.parametrize("background", ["", "--async-save"], ids=["sync", "async"])
@pytest.mark.parametrize("half", [0, 1])  # a test may not take longer than half an hour
def test_twenty_random_moments(corpus, tmp_path, launcher, background, half):
    """From the start of the interpreters to the last evaluation; each time the same command.

    A worker is asked where workers are known; before that torchrun is, whose own code is not 0.
    """
    layout, iterations = Layout(pp=2, dp=2), 300
    length = (
        f"--eval-interval {EVALUATION} --eval-iters 12 --save-interval {SAVE} --keep-latest 3 "
        f"{background}"
    )
    words = command(corpus, iterations, DROPOUT, length)
    job = Job(tmp_path, [*words, *layout.flags], 4)
    generator = random.Random(int(launcher) + 2 * bool(background) + 4 * half)
    fell = Counter()
    for kind in generator.sample(MOMENTS, len(MOMENTS)):
        first = job.iteration
        job.start()
        await_moment(job, kind, generator)
        workers = job.pids
        if generator.random() < 0.5 and workers and kind in ("clock", "training"):
            send(generator.choice(workers), signal.SIGUSR1)
            time.sleep(generator.uniform(0.0, 0.3))
        worker = None if launcher or not workers else generator.choice(workers)
        was_saving = is_saving(job)
        send(job.process.pid if worker is None else worker, signal.SIGTERM)
        code = job.wait()
        assert worker is None or code == 0, job.output.read_text()
        if job.pointer is not None:
            assert verify(iteration_directory(job.save, job.pointer)) == []
        fell[phase(job, first, was_saving)] += 1
    assert all(fell[kind] >= least for kind, least in LEAST.items()), fell
    assert job.start().wait() == 0, job.output.read_text()
    assert_same_end(job, words, layout, iterations)
