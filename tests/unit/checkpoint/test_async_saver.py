"""Saving in the background: the bytes of a save in the foreground, and no failure lost."""

import errno
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from mcore.checkpoint import (
    Aftercare,
    AsyncSaver,
    CheckpointReader,
    RankLocal,
    Rectangle,
    Retention,
    ShardedTensor,
    complete_iterations,
    dump,
    latest_iteration,
    save,
    shard_file,
)
from mcore.errors import CheckpointError, DamagedCheckpointError
from mcore.testing import run_distributed

POINTER = "latest_checkpointed_iteration.txt"


def state():
    torch.manual_seed(1)
    return {"model.w": torch.randn(300, 7), "exp_avg.w": torch.randn(5).double()}


def dumped(root, out):
    dump(CheckpointReader(root), out)
    return out.read_bytes()


@pytest.fixture
def gate(monkeypatch):
    """Holds every write back until it is set."""
    gate, write = threading.Event(), shard_file._write

    def slow(*args):
        assert gate.wait(30)
        return write(*args)

    monkeypatch.setattr(shard_file, "_write", slow)
    yield gate
    gate.set()


def test_the_bytes_are_those_of_the_moment_of_the_save(tmp_path, gate):
    tensors = state()
    local = RankLocal(0, {"dp": 1}, {"rng": torch.arange(3)})
    common = {"iteration": 5, "schedule": {"steps": 5}}
    saver = AsyncSaver()
    saver.save(tmp_path / "async", 5, tensors, common, rank_local=local)
    common["schedule"]["steps"] = 6
    before = state()
    for tensor in [*tensors.values(), *local.tensors.values()]:
        tensor.add_(1)  # training goes on
    assert saver.poll()
    assert latest_iteration(tmp_path / "async") is None
    gate.set()
    saver.close()
    common["schedule"]["steps"] = 5
    save(
        tmp_path / "sync",
        5,
        before,
        common,
        rank_local=RankLocal(0, {"dp": 1}, {"rng": torch.arange(3)}),
    )
    assert dumped(tmp_path / "async", tmp_path / "a") == dumped(tmp_path / "sync", tmp_path / "b")
    one, other = (CheckpointReader(tmp_path / name) for name in ("async", "sync"))
    assert one.common == other.common
    assert torch.equal(one.tensor("rng.rank_00000"), torch.arange(3))


def test_a_second_save_waits_and_buffers_are_used_again(tmp_path, gate):
    tensors, saver = state(), AsyncSaver()
    saver.save(tmp_path, 1, tensors, {})
    pointers = [buffer.data_ptr() for buffer in saver._staging._buffers.values()]
    start = time.monotonic()
    threading.Timer(0.3, gate.set).start()
    saver.save(tmp_path, 2, tensors, {})
    assert time.monotonic() - start > 0.2
    assert latest_iteration(tmp_path) in (1, 2)
    assert [buffer.data_ptr() for buffer in saver._staging._buffers.values()] == pointers
    assert saver.staging_bytes == sum(tensor.nbytes for tensor in tensors.values())
    saver.close()
    assert complete_iterations(tmp_path) == [1, 2]
    assert not [t for t in threading.enumerate() if t.name == "checkpoint-writer"]


@pytest.mark.parametrize("where", ["poll", "save", "wait", "close"])
def test_a_failure_is_raised_by_whatever_comes_next(tmp_path, monkeypatch, where):
    save(tmp_path, 1, state(), {})
    write = shard_file._write

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_file, "_write", full)
    saver = AsyncSaver()
    saver.save(tmp_path, 2, state(), {})
    saver._thread.join()
    with pytest.raises(CheckpointError, match="No space left"):
        saver.save(tmp_path, 3, state(), {}) if where == "save" else getattr(saver, where)()
    assert latest_iteration(tmp_path) == 1
    assert complete_iterations(tmp_path) == [1]
    monkeypatch.setattr(shard_file, "_write", write)
    if where != "close":
        saver.save(tmp_path, 3, state(), {})
        saver.close()
        assert latest_iteration(tmp_path) == 3


def test_what_was_written_is_read_back(tmp_path, monkeypatch):
    care = Aftercare(verify=True, retention=Retention(keep_latest=1))
    saver = AsyncSaver()
    saver.save(tmp_path, 1, state(), {}, aftercare=care)
    saver.wait()
    write = shard_file.write_shard

    def disk_that_lies(path, *args):
        result = write(path, *args)
        content = bytearray(path.read_bytes())
        content[-3] ^= 4
        path.write_bytes(content)
        return result

    monkeypatch.setattr("mcore.checkpoint.storage.write_shard", disk_that_lies)
    saver.save(tmp_path, 2, state(), {}, aftercare=care)
    with pytest.raises(DamagedCheckpointError, match="not on the disk as it was written"):
        saver.wait()
    assert latest_iteration(tmp_path) == 1
    monkeypatch.setattr("mcore.checkpoint.storage.write_shard", write)
    saver.save(tmp_path, 2, state(), {}, aftercare=care)
    saver.close()
    assert (latest_iteration(tmp_path), complete_iterations(tmp_path)) == (2, [2])


def save_on_two(root):
    """One rank's disk is full in the second save; both hear of it at the same poll."""
    rank = torch.distributed.get_rank()
    write = shard_file._write

    def tensors(value):
        box = Rectangle((rank * 2, 0), torch.full((2, 3), float(value + rank)))
        return {"model.w": ShardedTensor("model.w", (4, 3), torch.float32, [box])}

    saver = AsyncSaver(timeout=timedelta(seconds=50))
    backends = [g._get_backend(torch.device("cpu")) for g in (saver._writing, saver._watching)]
    assert [backend.options._timeout.seconds for backend in backends] == [50, 50]
    saver.save(root, 1, tensors(1), {})
    saver.wait()
    if rank == 1:

        def full(*_):
            time.sleep(0.3)
            raise OSError(errno.ENOSPC, "No space left on device")

        shard_file._write = full
    polls, text = 0, ""
    saver.save(root, 2, tensors(2), {})
    try:
        while saver.poll():
            polls += 1
            torch.distributed.barrier()  # a training step
            time.sleep(0.02)
    except CheckpointError as error:
        text = str(error)
    finally:
        shard_file._write = write
    saver.save(root, 3, tensors(3), {}, aftercare=Aftercare(True, Retention(keep_latest=1)))
    saver.close()
    return polls, text


@pytest.mark.dist
def test_ranks_learn_of_a_failure_together(tmp_path):
    first, second = run_distributed(save_on_two, 2, tmp_path, timeout=60)
    assert first == second
    assert "No space left" in first[1]
    assert (latest_iteration(tmp_path), complete_iterations(tmp_path)) == (3, [3])
    assert CheckpointReader(tmp_path).tensor("model.w")[:, 0].tolist() == [3, 3, 4, 4]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="niceness of threads")
def test_the_thread_gives_way_to_training():
    def niceness():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    seen = []

    def job(_):
        seen.append(niceness())
        with ThreadPoolExecutor(1) as executor:
            seen.append(executor.submit(niceness).result())

    before = niceness()
    saver = AsyncSaver()
    saver.start(job)
    saver.close()
    assert seen == [before + 10] * 2
    assert niceness() == before


GROWTH = """
import gc, os, sys, threading, torch
from mcore.checkpoint import AsyncSaver
def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
saver = AsyncSaver()
tensors = {f"model.{i}": torch.randn(2**18) for i in range(int(sys.argv[2]))}
for number in range(60):
    saver.save(sys.argv[1], number % 2, tensors, {"iteration": number})
    saver.wait()
    if number == 9:
        after_ten = resident()
print(resident() - after_ten)
saver.close()
assert threading.active_count() == 1
"""


@pytest.mark.full
def test_sixty_saves_take_no_more_memory_than_ten(tmp_path):
    words = [sys.executable, "-c", GROWTH, str(tmp_path), "50"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 5
