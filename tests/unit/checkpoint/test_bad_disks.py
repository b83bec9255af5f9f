"""Disks that fill up, refuse or go away while two ranks save: one clear error on both, no hang."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore.checkpoint import (
    AsyncSaver,
    complete_iterations,
    latest_iteration,
    read_tensors,
    save,
    shard_file,
    verify,
)
from mcore.checkpoint.commit import iteration_directory
from mcore.errors import CheckpointError
from mcore.testing import run_distributed

pytestmark = pytest.mark.dist


def _state(iteration, megabytes):
    elements = int(megabytes * 2**20) // 8  # of each of two ranks
    return {f"model.{dist.get_rank()}": torch.full((elements,), float(iteration))}


def _saves(root, plan, background):
    """What each save of a rank ended with: nothing, or its message."""
    saver = AsyncSaver() if background else None
    outcomes = []
    for iteration, megabytes in plan:
        try:
            if saver is None:
                save(root, iteration, _state(iteration, megabytes), {})
            else:
                saver.save(root, iteration, _state(iteration, megabytes), {})
                saver.wait()
            outcomes.append(None)
        except CheckpointError as error:
            outcomes.append(str(error))
    if saver is not None:
        saver.close()
    return outcomes


def assert_only_first(root):
    """Iteration 1 is there, whole, and is what the pointer names; nothing of a second one."""
    assert (latest_iteration(root), complete_iterations(root)) == (1, [1])
    assert verify(iteration_directory(root, 1)) == []
    assert all((tensor == 1).all() for tensor in read_tensors(root).values())
    assert not list(root.glob("iter_0000002/*"))


@pytest.fixture
def disk(tmp_path):
    """A disk of 3 MB of its own."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a disk takes root")
    words = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("disks cannot be mounted here")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_fills_up(disk, background):
    plan = [(1, 1.0), (2, 2.5)]
    answers = run_distributed(_saves, 2, disk, plan, background, timeout=60)
    assert [answer[0] for answer in answers] == [None, None]
    for answer in answers:
        assert f"{disk}/iter_0000002 could not be saved: " in answer[1]
        assert "No space left on device" in answer[1]
        assert "that of iteration 1 is still the newest" in answer[1]
    assert_only_first(disk)
    assert run_distributed(_saves, 2, disk, [(2, 1.0)], background, timeout=60) == [[None]] * 2
    assert complete_iterations(disk) == [1, 2]


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_became_read_only(disk, background):
    run_distributed(_saves, 2, disk, [(1, 1.0)], background, timeout=60)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    answers = run_distributed(_saves, 2, disk, [(2, 1.0)], background, timeout=60)
    assert all("Read-only file system" in answer[0] for answer in answers)
    assert_only_first(disk)


def _failing_saves(root, plan, background, fault):
    """Rank 1's disk fails as it begins to write iteration 2."""
    write = shard_file._write

    def fails(path, *args):
        if path.parent.name != "iter_0000002" or dist.get_rank() != 1:
            return write(path, *args)
        if fault == "vanishes":
            # Aside first: rank 0 may begin a file in it while it is being emptied.
            shutil.rmtree(path.parent.rename(path.parent.with_name("gone")))
            return write(path, *args)
        raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)), str(path))

    shard_file._write = fails
    try:
        return _saves(root, plan, background)
    finally:
        shard_file._write = write


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("ENOSPC", "No space left on device"),
        ("EROFS", "Read-only file system"),
        ("EIO", "Input/output error"),
        ("ESTALE", "Stale file handle"),
        ("vanishes", "No such file or directory"),
    ],
)
def test_a_disk_that_fails_one_rank(tmp_path, fault, words, background):
    plan = [(1, 0.1), (2, 0.1)]
    answers = run_distributed(_failing_saves, 2, tmp_path, plan, background, fault, timeout=60)
    assert [answer[0] for answer in answers] == [None, None]
    assert all(words in answer[1] for answer in answers)
    assert_only_first(tmp_path)


def _slow_ranks(root):
    """Rank 1 writes late; in between rank 0 deletes the whole save root."""
    write = shard_file._write

    def late(path, *args):
        if dist.get_rank() == 1:
            dist.barrier()
            return write(path, *args)
        result = write(path, *args)
        shutil.rmtree(root)
        dist.barrier()
        return result

    shard_file._write = late
    try:
        first = _saves(root, [(1, 0.1)], False)
    finally:
        shard_file._write = write
    return first + _saves(root, [(2, 0.1)], False)


def test_a_save_root_that_vanishes_is_an_error_and_is_made_again_by_the_next(tmp_path):
    root = tmp_path / "save"
    answers = run_distributed(_slow_ranks, 2, root, timeout=60)
    assert all("No such file or directory" in answer[0] for answer in answers)
    assert [answer[1] for answer in answers] == [None, None]
    assert (latest_iteration(root), complete_iterations(root)) == (2, [2])


def test_a_save_root_that_is_a_file(tmp_path):
    root = Path(tmp_path / "save")
    root.write_text("as after a mount that went away")
    answers = run_distributed(_saves, 2, root, [(1, 0.1)], False, timeout=60)
    assert all("save" in answer[0] for answer in answers)
    assert root.read_text().startswith("as after")
