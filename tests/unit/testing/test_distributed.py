"""The harness: failures and hangs come back with rank and reason, and nothing stays behind."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from mcore.testing import WorkerError, run_distributed

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif("RANK" in os.environ, reason="of the pool, which torchrun's ranks replace"),
]


def _pid():
    return os.getpid()


def _fail_on(rank):
    if dist.get_rank() == rank:
        raise KeyError("deliberate")
    dist.all_reduce(torch.ones(1))


def _hang():
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def _die():
    if dist.get_rank() == 1:
        os._exit(7)


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_are_reused():
    assert run_distributed(_pid, 2) == run_distributed(_pid, 2)


def test_the_first_failing_ranks_error_is_raised_and_the_world_ends():
    pids = run_distributed(_pid, 2)
    with pytest.raises(KeyError, match="deliberate") as caught:
        run_distributed(_fail_on, 2, 1)
    assert "rank 1" in str(caught.value.__cause__)
    assert not any(_is_alive(pid) for pid in pids)


def test_a_hang_shows_every_ranks_stack():
    pids = run_distributed(_pid, 2)
    with pytest.raises(WorkerError, match="no answer after 2") as caught:
        run_distributed(_hang, 2, timeout=2)
    assert "all_reduce" in str(caught.value)
    assert "_hang" in str(caught.value)
    assert not any(_is_alive(pid) for pid in pids)


def test_a_dead_worker_is_named():
    with pytest.raises(WorkerError, match="rank 1 ended with exit code 7"):
        run_distributed(_die, 2)
