"""A rank that dies, raises or stands still in the middle of a step ends the whole job in time.

Each misfortune happens at a known action, so that messages can be checked. Limits are those of the
product: 60 s after a death, the timeout + 35 s after a stop (30 s of them are torchrun's patience
with a process that does not end). Ranks that are started without torchrun have nobody who ends
them: each has to notice by itself, and says so.

What users of such systems reported about hangs (scenario class J), and where it is tested:

| scenario | covered by |
|---|---|
| J02 interleaving hangs at different speeds | `test_pipelines`, `test_schedules` (random delays) |
| J04 as many microbatches as stages, and one more | `test_pipelines` |
| J06 microbatch counts that pp does not divide | `test_pipelines`; `config/test_pipeline` |
| J07 a rank dies, raises, or stands still | here; `test_pretrain_gpt` |
| J08 elastic restarts | here |
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_pretrain_gpt import processes_that_name
from tests.equivalence.program import (
    Layout,
    largest_difference,
    read_records,
    train,
    without_rates,
)
from tests.equivalence.tiny import command

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "cli" / "failing_program.py"
LAUNCHER = "-m torch.distributed.run --standalone --nproc-per-node"
START_SECONDS = 200
DEATH_SECONDS = 60

pytestmark = pytest.mark.cli
full = pytest.mark.full


def environment(**more):
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def start(words, folder, **more):
    """A process whose output goes to a file (a pipe would keep us waiting for its children)."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment(**more),
        stdout=(folder / f"output{more.get('RANK', '')}.txt").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for(marker, jobs):
    """Wait for the misfortune."""
    end = time.monotonic() + START_SECONDS
    while not marker.exists() and time.monotonic() < end:
        ended = [job.poll() is not None for job in jobs]
        assert marker.exists() or not any(ended), "the job ended before its misfortune"
        time.sleep(0.02)
    assert marker.exists()
    return time.monotonic()


def end(jobs):
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.wait(timeout=30)


def misfortune(what, rank, count, folder, seconds=60):
    return [PROGRAM, what, rank, count, folder / "marker", seconds]


def errors(output):
    return [line for line in output.splitlines() if line.startswith("error: ")]


def free_port():
    """Below those from which the system serves the process groups of other tests."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("no free port")


def run_ranks(words, size, folder, limit, stopped=None):
    """What each rank says and its exit code, in a job without a launcher that fails in time."""
    port = free_port()
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    jobs = [start(words, folder, RANK=str(rank), **world) for rank in range(size)]
    try:
        limit += wait_for(folder / "marker", jobs)
        running = [job for rank, job in enumerate(jobs) if rank != stopped]
        codes = [job.wait(timeout=limit - time.monotonic()) for job in running]
    finally:
        end(jobs)
    assert 0 not in codes
    assert processes_that_name(folder) == []
    return [(folder / f"output{rank}.txt").read_text() for rank in range(size)]


#: What a neighbour in the pipeline says.
LOST = r"waited for .*\(chunk \d, microbatch \d\) .*\(global rank {0}\)"

#: What happens to which rank at which forward or sample; what which rank has to say.
FAILURES = {
    "killed": ("kill", Layout(pp=2), 1, 5, 0, LOST.format(1)),
    "killed-first": (
        "kill",
        Layout(pp=2),
        0,
        6,
        1,
        r"waited for .*microbatch \d\).* \(global rank 0\)",
    ),
    "killed-zb-v": ("kill", Layout(pp=2), 0, 9, 1, LOST.format(0)),
    "killed-tensor-rank": ("kill", Layout(tp=2, pp=2, sp=True), 1, 6, 0, r"rank 1 in .* group tp"),
    "killed-replica": ("kill", Layout(dp=2), 1, 4, 0, r"rank 1 in a collective of group dp"),
    "raises": ("raise", Layout(pp=2), 1, 5, 1, r"failed in F0\.0 .*ValueError: a misfortune"),
    "corrupt-sample": ("data", Layout(pp=2), 1, 6, 1, r"F0\.1 .*microbatch 1.*: sample \d+ is"),
    "corrupt-with-replicas": (
        "data",
        Layout(pp=2, dp=2),
        3,
        3,
        3,
        r"rank 3: sample \d+ is corrupt",
    ),
}


@pytest.mark.parametrize(
    "case",
    [name if name == "killed" else pytest.param(name, marks=full) for name in FAILURES],
)
def test_every_rank_leaves_when_one_fails(corpus, tmp_path, case):
    what, layout, rank, count, speaker, message = FAILURES[case]
    schedule = "--pipeline-schedule zb-v" if case.endswith("zb-v") else ""
    words = command(corpus, 50, "--device cpu", schedule, *layout.flags)
    failing = [*misfortune(what, rank, count, tmp_path), *words]
    said = run_ranks(failing, layout.world_size, tmp_path, DEATH_SECONDS)
    assert re.search(message, said[speaker]), said
    if what == "kill":  # whatever a survivor was waiting for, it names the one that died
        others = [text for other, text in enumerate(said) if other != rank]
        died = rf"rank {rank} \(process \d+\) has died (in|waiting|between)"
        assert all(re.search(died, text) for text in others), said


def test_every_rank_leaves_when_one_stands_still(corpus, tmp_path):
    words = command(corpus, 50, "--device cpu --distributed-timeout-minutes 1", *Layout(pp=2).flags)
    failing = [*misfortune("stop", 1, 5, tmp_path, seconds=20), *words]
    said, _ = run_ranks(failing, 2, tmp_path, 20 + 30, stopped=1)
    assert re.search(LOST.format(1), said)
    assert re.search(r"; rank 1 \(process \d+\) is stopped in F0\.\d", said)
    assert len(errors(said)) == 1


def run_under_torchrun(words, size, folder, limit):
    """Output of a job that fails within the limit and leaves nothing behind."""
    job = start([*LAUNCHER.split(), size, *words], folder)
    try:
        began = wait_for(folder / "marker", [job])
        code = job.wait(timeout=limit)
        print(f"ended after {time.monotonic() - began:.1f} s")
    finally:
        end([job])
    assert code not in (0, -signal.SIGKILL)
    assert processes_that_name(folder) == []
    return (folder / "output.txt").read_text()


#: What a rank says that computes while another one dies.
BESIDE = (
    r"error: rank 0: rank 1 \(process \d+\) has died in F0\.1 \(chunk 0, microbatch 1\); leaving "
    r"\(this rank was in F0\.2 \(chunk 0, microbatch 2\)\)"
)
#: What one that waits says first, by itself or since torchrun ends it.
AWAITED = rf"{LOST}|rank {{0}} in a collective|rank {{0}} \(process \d+\) has died"


@pytest.mark.parametrize(
    ("layout", "what", "count", "message"),
    [
        pytest.param(Layout(pp=2), "kill-beside", 2, BESIDE, id="the-other-computes"),
        pytest.param(Layout(pp=2), "kill", 5, AWAITED, marks=full, id="the-other-waits"),
        pytest.param(Layout(pp=2, dp=2), "kill", 5, AWAITED, marks=full, id="replicas"),
    ],
)
def test_a_job_whose_rank_is_killed_ends(corpus, tmp_path, layout, what, count, message):
    words = command(corpus, 50, "--device cpu", *layout.flags)
    rank = layout.world_size - 1
    failing = [*misfortune(what, rank, count, tmp_path), *words]
    output = run_under_torchrun(failing, layout.world_size, tmp_path, DEATH_SECONDS)
    assert re.search(rf"rank +: {rank} .*\n +exitcode +: -9", output), output
    assert re.search(message.format(rank), output), output
    assert re.search(rf"rank {rank} \(process \d+\) has died ", output), output


@full
@pytest.mark.parametrize("layout", [Layout(pp=2, dp=2), Layout(tp=2, pp=2)], ids=str)
def test_a_job_whose_rank_stands_still_ends(corpus, tmp_path, layout):
    words = command(corpus, 50, "--device cpu --distributed-timeout-minutes 1", *layout.flags)
    failing = [*misfortune("stop", 3, 4, tmp_path), *words]
    output = run_under_torchrun(failing, layout.world_size, tmp_path, 60 + 35)
    assert re.search(LOST.format(3) + "|rank 3 in a collective", output)


@full
def test_an_elastic_restart_goes_on_from_the_last_checkpoint(corpus, tmp_path):
    """Two such jobs on one machine at once; then fewer processes with the same global batch."""
    folders = [tmp_path / name for name in ("first", "second")]
    curve = "--hidden-dropout 0.1 --lr-decay-iters 12"
    saving = "--device cpu --save-interval 2 --save save --load save --metrics-jsonl records.jsonl"
    jobs = []
    try:
        for folder in folders:
            folder.mkdir()
            launcher = [*LAUNCHER.split(), 2, "--max-restarts", 2]
            failing = misfortune("kill", 1, 2 * 4 + 2, folder)  # in iteration 5 of dp 2
            jobs.append(start([*launcher, *failing, *command(corpus, 8, curve, saving)], folder))
        assert [job.wait(timeout=2 * START_SECONDS) for job in jobs] == [0, 0]
    finally:
        end(jobs)
    straight = train(command(corpus, 8, curve), Layout(dp=2))
    for folder in folders:
        assert (folder / "marker").exists()
        assert without_rates(read_records(folder / "records.jsonl")) == without_rates(straight)
    longer = f"--load {folders[0] / 'save'} --override-opt-param-scheduler"
    resumed = train(command(corpus, 12, curve, longer))
    assert [record["iteration"] for record in resumed] == [9, 10, 11, 12]
    whole = train(command(corpus, 12, curve))
    assert largest_difference(resumed, whole[8:]) <= 1e-5
