"""Under torchrun the ranks that exist are used, and no case leaves anything to the next."""

import os
import subprocess
import sys

import pytest

#: What rank 1's session has of its own must not matter: its folder, for one.
CASES = """
import time
import pytest
import torch
import torch.distributed as dist
from mcore import parallel_state
from mcore.testing import WorkerError, run_distributed

def ranks_and_file(path):
    parallel_state.initialize_model_parallel(2)
    path.joinpath(str(dist.get_rank())).write_text("here")
    return dist.get_rank(), dist.get_world_size()

def fail_on(rank):
    group = parallel_state.initialize_model_parallel(2, order="tp-dp-pp").tp.handle
    if dist.get_rank() == rank:
        raise KeyError("deliberate")
    dist.all_reduce(torch.ones(1), group=group)

def wait_for_nobody():
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), src=1)
    time.sleep(1.5)

def test_arguments_are_those_of_rank_0(tmp_path):
    assert run_distributed(ranks_and_file, 2, tmp_path) == [(0, 2), (1, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]

@pytest.mark.parametrize("rank", [1, 0])
def test_a_failing_rank_is_told_and_the_other_does_not_wait(rank):
    started = time.monotonic()
    with pytest.raises(KeyError, match="deliberate") as caught:
        run_distributed(fail_on, 2, rank)
    assert f"rank {rank}" in str(caught.value.__cause__)
    assert time.monotonic() - started < 20

def test_timeout():
    with pytest.raises(RuntimeError, match="(?i)timed out"):
        run_distributed(wait_for_nobody, 2, timeout=1)

def test_nothing_is_left():
    assert not dist.is_initialized()
    assert parallel_state.is_unitialized()
    assert run_distributed(dist.get_rank, 2) == [0, 1]

def test_another_number_of_ranks():
    run_distributed(dist.get_rank, 3)

"""


@pytest.mark.cli
@pytest.mark.full
def test_cases_under_torchrun(tmp_path):
    cases = tmp_path / "test_cases.py"
    cases.write_text(CASES)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pytest"]
    done = subprocess.run(
        [sys.executable, *words, "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, cases],
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed, 1 skipped" in done.stdout, done.stdout  # rank 0
    assert "6 skipped" in done.stdout, done.stdout  # rank 1, which took part in rank 0's
