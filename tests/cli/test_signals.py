"""Signals and deaths at any moment: the job saves, leaves or starts again, and the numbers stay."""

import os
import random
import re
import signal
import time

import pytest

from mcore.checkpoint import CheckpointReader, complete_iterations, differences, verify
from mcore.checkpoint.commit import iteration_directory
from tests.cli.jobs import Job
from tests.equivalence.program import Layout, read_records, train, without_rates
from tests.equivalence.tiny import command

pytestmark = pytest.mark.cli

DROPOUT = "--hidden-dropout 0.1"


def records(folder):
    return without_rates(read_records(folder / "r.jsonl"))


def test_one_save_on_the_way_and_one_before_leaving_then_the_same_command(corpus, tmp_path):
    """SIGUSR1 to one worker, SIGTERM to another: all save the same iteration, and exit with 0."""
    layout = Layout(tp=2)
    words = command(corpus, 60, DROPOUT, "--eval-interval 7 --eval-iters 1")
    job = Job(tmp_path, [*words, *layout.flags], 2).start()
    job.wait_until(lambda: job.iteration >= 3 and len(job.pids) == 2)
    os.kill(job.pids[1], signal.SIGUSR1)
    job.wait_until(lambda: job.pointer)
    saved = job.pointer
    job.wait_until(lambda: job.iteration > saved)
    os.kill(job.pids[1], signal.SIGTERM)
    assert job.wait() == 0, job.output.read_text()
    assert complete_iterations(job.save) == [saved, job.pointer]
    assert saved < job.pointer == job.iteration < 60
    assert f"exiting at iteration {job.pointer} (SIGTERM)" in job.output.read_text()
    assert verify(iteration_directory(job.save, job.pointer)) == []
    assert job.start().wait() == 0, job.output.read_text()
    assert records(tmp_path) == without_rates(train(words, layout))


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
    assert records(tmp_path) == without_rates(train(words, layout))


@pytest.mark.full
def test_a_rank_is_killed_and_torchrun_starts_again(corpus, tmp_path):
    layout = Layout(pp=2)
    words = [*command(corpus, 40, DROPOUT, "--save-interval 5"), *layout.flags]
    job = Job(tmp_path / "killed", words, 2, ["--max-restarts", "3"])
    job.folder.mkdir()
    job.start().wait_until(lambda: job.iteration >= 8 and len(job.pids) == 2)
    os.kill(job.pids[1], signal.SIGKILL)
    assert job.wait() == 0, job.output.read_text()
    assert re.search(r"error: rank 0: .*rank 1", job.output.read_text())
    assert "loaded checkpoint" in job.output.read_text()
    straight = command(corpus, 40, DROPOUT, f"--save {tmp_path}/straight --save-interval 5")
    assert records(job.folder) == without_rates(train(straight, layout))
    last = [iteration_directory(root, 40) for root in (job.save, tmp_path / "straight")]
    assert list(differences(*map(CheckpointReader, last))) == []


@pytest.mark.full
def test_with_the_handler_off_a_signal_kills(corpus, tmp_path):
    job = Job(tmp_path, command(corpus, 500, "--no-exit-signal-handler"), 0).start()
    job.wait_until(lambda: job.iteration >= 2)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM
    assert job.pointer is None


@pytest.mark.full
@pytest.mark.parametrize("launcher", [True, False], ids=["torchrun", "worker"])
@pytest.mark.parametrize("background", ["", "--async-save"], ids=["sync", "async"])
def test_twenty_random_moments(corpus, tmp_path, launcher, background):
    """From the start of the interpreters to the last evaluation; each time the same command."""
    layout = Layout(pp=2, dp=2)
    length = f"--eval-interval 10 --eval-iters 4 --save-interval 25 --keep-latest 3 {background}"
    words = command(corpus, 400, DROPOUT, length)
    job = Job(tmp_path, [*words, *layout.flags], 4)
    generator = random.Random(int(launcher) + 2 * bool(background))
    for _ in range(20):
        job.start()
        time.sleep(generator.uniform(0.0, 12.0))
        if generator.random() < 0.5 and job.pids:
            os.kill(generator.choice(job.pids), signal.SIGUSR1)
            time.sleep(generator.uniform(0.0, 0.3))
        target = job.process.pid if launcher or not job.pids else generator.choice(job.pids)
        if job.process.poll() is None:
            os.kill(target, signal.SIGTERM)
        code = job.wait(60)
        assert launcher or code in (0, -signal.SIGTERM), job.output.read_text()
        if job.pointer is not None:
            assert verify(iteration_directory(job.save, job.pointer)) == []
    assert job.start().wait() == 0, job.output.read_text()
    assert records(tmp_path) == without_rates(train(words, layout))
