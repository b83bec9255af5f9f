"""Whole jobs killed while they save, again and again: none loses its pointer or its way."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore.checkpoint import complete_iterations, latest_iteration, verify
from mcore.checkpoint.commit import iteration_directory
from tests.equivalence.program import read_records, train, without_rates
from tests.equivalence.tiny import command

ROOT = Path(__file__).parents[2]
ITERATIONS = 24
START_SECONDS = 120.0


def start(words):
    return subprocess.Popen(
        [sys.executable, "pretrain_gpt.py", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def kill_soon_after_a_save_begins(process, root, delay):
    """SIGKILL `delay` seconds after a new iteration's directory appears; True if it was in time."""
    known = {entry.name for entry in root.glob("iter_*")}
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        if {entry.name for entry in root.glob("iter_*")} - known:
            break
        time.sleep(0.001)
    time.sleep(delay)
    in_time = process.poll() is None
    if in_time:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    assert "Traceback" not in process.stdout.read()
    return in_time


@pytest.mark.cli
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.full)])
@pytest.mark.parametrize("background", ["--async-save", pytest.param("", marks=pytest.mark.full)])
def test_killed_at_any_moment_of_a_save(corpus, tmp_path, rounds, background):
    root, records = tmp_path / "save", tmp_path / "records.jsonl"
    root.mkdir()
    words = command(
        corpus,
        ITERATIONS,
        f"--save {root} --load {root} --save-interval 2 --keep-latest 2 {background}",
        f"--metrics-jsonl {records} --hidden-dropout 0.1 --device cpu",
    )
    generator = random.Random(rounds + bool(background))
    for _ in range(rounds):
        before = latest_iteration(root)
        process = start(words)
        if not kill_soon_after_a_save_begins(process, root, generator.uniform(0.0, 0.05)):
            break  # the run came to its end
        pointer = latest_iteration(root)
        complete = complete_iterations(root)
        assert pointer is None or pointer in complete
        assert before is None or (pointer is not None and pointer >= before)
        if pointer is not None:
            assert verify(iteration_directory(root, pointer)) == []
    process = start(words)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert latest_iteration(root) == ITERATIONS
    straight = train(command(corpus, ITERATIONS, "--hidden-dropout 0.1"))
    assert without_rates(read_records(records)) == without_rates(straight)


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
