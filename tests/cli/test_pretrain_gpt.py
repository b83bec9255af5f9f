"""The program as users start it: from a shell, from any directory, with and without torchrun."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.equivalence.program import Layout, largest_difference, read_records, train
from tests.equivalence.tiny import command

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "pretrain_gpt.py"
LIMIT_SECONDS = 240  # of a test; what the product promises is asserted where it matters

pytestmark = pytest.mark.cli


def start(words, folder):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def torchrun(folder, size, *words):
    """Start under torchrun; what each worker wrote to stderr is in the second result."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size]
    logs = ["--log-dir", folder / "logs", "--redirects", "3"]
    done = start([*launcher, *logs, *words], folder)
    errors = [path.read_text() for path in sorted((folder / "logs").glob("**/stderr.log"))]
    return done, errors


def worker_output(folder):
    return "".join(path.read_text() for path in (folder / "logs").glob("**/stdout.log"))


def processes_that_name(folder):
    """Processes of this machine with the folder on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in path.read_bytes().decode(errors="replace"):
                found.append(path.parent.name)
        except OSError:  # it has ended
            continue
    return found


def test_one_process_without_torchrun_from_another_directory(corpus, tmp_path):
    words = command(corpus, 4, "--log-interval 2 --metrics-jsonl records.jsonl --device cpu")
    done = start([PROGRAM, *words], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| consumed samples:") == 2
    assert read_records(tmp_path / "records.jsonl")[-1]["iteration"] == 4


def test_torchrun_trains_saves_and_computes_what_the_tests_compute(corpus, tmp_path):
    words = command(corpus, 4, "--hidden-dropout 0.1 --attention-dropout 0.1 --log-interval 1")
    layout = Layout(tp=2, sp=True)
    files = ["--metrics-jsonl", "r.jsonl", "--save", "save", "--save-interval", "4"]
    done, errors = torchrun(tmp_path, 2, PROGRAM, *words, *layout.flags, *files, "--device", "cpu")
    assert done.returncode == 0, errors
    assert largest_difference(read_records(tmp_path / "r.jsonl"), train(words, layout)) == 0.0
    pointer = tmp_path / "save" / "latest_checkpointed_iteration.txt"
    assert pointer.read_text() == "4"
    assert any((tmp_path / "save" / "tensorboard").iterdir())
    # Every interval is told once, by one rank.
    assert worker_output(tmp_path).count("| consumed samples:") == 4


def test_a_refused_command_line_is_told_once_and_nothing_else_is(corpus, tmp_path):
    words = command(corpus, 4, "--tensor-model-parallel-size 3 --hidden-siz 2")
    done, errors = torchrun(tmp_path, 2, PROGRAM, *words)
    assert done.returncode != 0
    assert sum(text.count("error:") for text in errors) == 1
    for fragment in (
        "did you mean --hidden-size?",
        "--num-attention-heads (4) must be divisible by --tensor-model-parallel-size (3)",
    ):
        assert fragment in "".join(errors)
    assert not any("Traceback" in text for text in errors)


@pytest.mark.full
def test_an_error_that_all_ranks_see_is_told_once(tmp_path):
    words = command(str(tmp_path / "absent"), 4)
    done, errors = torchrun(tmp_path, 2, PROGRAM, *words, "--device", "cpu")
    assert done.returncode != 0
    assert sum(text.count("error:") for text in errors) == 1
    assert "absent" in "".join(errors)
    assert not any("Traceback" in text for text in errors)


#: Every rank works in a folder of its own, and so reads a corpus of its own.
OWN_FOLDER = """
import os, runpy, sys
os.chdir(os.environ["RANK"])
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""

#: A fault of a user's code in the middle of a step, on one rank.
FAULTY_STEP = """
import os
import pretrain_gpt
from mcore.training import pretrain
from mcore.training.gpt import datasets_provider, model_provider

def forward_step(data_iterator, model):
    if os.environ["RANK"] == "1" and data_iterator.iteration == 2:
        raise RuntimeError("a fault of this rank")
    return pretrain_gpt.forward_step(data_iterator, model)

pretrain(datasets_provider, model_provider, forward_step)
"""


#: One rank's gradient is not a number as often as the first word says.
FAULTY_GRADIENT = """
import sys
from mcore.training import pretrain
from mcore.training.gpt import datasets_provider, model_provider
from tests.equivalence.faults import NanGradient

fault = NanGradient(rank=int(sys.argv.pop(1)), iteration=2, times=int(sys.argv.pop(1)))
pretrain(datasets_provider, model_provider, fault)
"""


@pytest.mark.parametrize(("times", "code"), [(1, 16), (100, 17)], ids=["transient", "real"])
def test_the_exit_code_tells_a_transient_fault_from_a_real_one(corpus, tmp_path, times, code):
    program = tmp_path / "faulty_gradient.py"
    program.write_text(FAULTY_GRADIENT)
    words = command(corpus, 4, "--device cpu --save save --save-interval 1")
    done = start([program, 0, times, *words], tmp_path)
    assert done.returncode == code, done.stderr
    assert ("a transient fault" in done.stderr) == (times == 1)
    assert "Traceback" not in done.stderr
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "1"


@pytest.mark.full
@pytest.mark.parametrize(("times", "code"), [(1, 16), (100, 17)], ids=["transient", "real"])
def test_every_rank_of_four_leaves_with_that_code(corpus, tmp_path, times, code):
    program = tmp_path / "faulty_gradient.py"
    program.write_text(FAULTY_GRADIENT)
    layout = Layout(tp=2, pp=2, sp=True)
    last = 3  # of the stage that makes the loss
    words = [*command(corpus, 4, "--device cpu"), *layout.flags]
    done, errors = torchrun(tmp_path, 4, program, last, times, *words)
    assert done.returncode != 0
    assert f"(exitcode: {code})" in done.stderr
    assert sum("NaN or infinity" in text for text in errors) == 1
    assert processes_that_name(tmp_path) == []


@pytest.mark.full
def test_a_rank_that_alone_cannot_read_its_data_ends_the_job(corpus, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        if rank == 0:
            for ending in (".bin", ".idx"):
                os.link(corpus + ending, tmp_path / "0" / f"text{ending}")
    program = tmp_path / "own_folder.py"
    program.write_text(OWN_FOLDER)
    words = command("text", 50, "--device cpu --tensor-model-parallel-size 2")
    began = time.monotonic()
    done, errors = torchrun(tmp_path, 2, program, PROGRAM, *words)
    assert done.returncode != 0
    assert time.monotonic() - began < 60 + 30  # the start of three interpreters is not the wait
    assert "error: rank 1:" in "".join(errors)
    assert "Traceback" not in "".join(errors)
    assert processes_that_name(tmp_path) == []


@pytest.mark.full
def test_a_rank_that_fails_inside_a_step_ends_the_job(corpus, tmp_path):
    program = tmp_path / "faulty_step.py"
    program.write_text(FAULTY_STEP)
    words = command(corpus, 50, "--device cpu --metrics-jsonl r.jsonl")
    began = time.monotonic()
    done, errors = torchrun(tmp_path, 2, program, *words)
    assert done.returncode != 0
    assert time.monotonic() - began < 60 + 30
    assert "a fault of this rank" in "".join(errors)
    assert [json.loads(line)["iteration"] for line in (tmp_path / "r.jsonl").open()] == [1]
    assert processes_that_name(tmp_path) == []


@pytest.mark.full
def test_jobs_at_once_on_one_corpus_none_of_which_writes_beside_it(corpus, tmp_path):
    """Three start together, one is killed while it starts, and is started again (there is no index
    to build, so there is none to find half-built)."""
    words = [PROGRAM, *command(corpus, 6, "--device cpu")]
    beside = sorted(os.listdir(Path(corpus).parent))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    jobs = [
        subprocess.Popen(
            [sys.executable, *map(str, words), "--metrics-jsonl", str(tmp_path / f"{job}.jsonl")],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for job in range(3)
    ]
    time.sleep(2)
    jobs[0].kill()
    codes = [job.wait(timeout=LIMIT_SECONDS) for job in jobs]
    assert codes[1:] == [0, 0]
    done = start([*words, "--metrics-jsonl", tmp_path / "again.jsonl"], tmp_path)
    assert done.returncode == 0, done.stderr
    runs = [read_records(tmp_path / f"{name}.jsonl") for name in ("1", "2", "again")]
    assert all(largest_difference(run, runs[0]) == 0.0 for run in runs[1:])
    assert sorted(os.listdir(Path(corpus).parent)) == beside


@pytest.mark.full
def test_a_request_for_20_million_samples_keeps_no_rank_waiting(corpus, tmp_path):
    """A small corpus at tp 1 pp 2 dp 2; what the ranks compute alone takes seconds, not minutes."""
    words = command(corpus, 5_000_000, "--exit-interval 1 --distributed-timeout-minutes 1")
    done, errors = torchrun(
        tmp_path, 4, PROGRAM, *words, *Layout(pp=2, dp=2).flags, "--device", "cpu"
    )
    assert done.returncode == 0, errors
