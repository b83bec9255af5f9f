"""Damage of every kind, and saves that die."""

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys

import pytest
import torch

from mcore.checkpoint import (
    complete_iterations,
    latest_iteration,
    load,
    read_tensors,
    save,
    saver,
    shard_file,
    verify,
)
from mcore.checkpoint.metadata import decode_metadata
from mcore.errors import CheckpointError

POINTER = "latest_checkpointed_iteration.txt"


def state(value):
    return {"model.a": torch.full((40, 5), float(value)), "model.b": torch.full((7,), -value)}


@pytest.fixture
def root(tmp_path):
    save(tmp_path, 10, state(10), {})
    save(tmp_path, 20, state(20), {})
    return tmp_path


def shard(root, iteration=20):
    return next((root / f"iter_{iteration:07d}").glob("*.safetensors"))


def assert_refused(root, *names):
    target = {key: torch.zeros_like(value) for key, value in state(0).items()}
    with pytest.raises(CheckpointError) as info:
        load(root, target)
    for name in names:
        assert str(name) in str(info.value)
    assert not any(value.any() for value in target.values())


def test_a_file_in_the_way_of_a_shard_stays(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        shard_file.write_shard(tmp_path / "a.safetensors", [])
    assert (tmp_path / "a.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize("step", [53, pytest.param(1, marks=pytest.mark.full)])
def test_every_truncation_of_every_file_is_detected(root, step):
    directory = root / "iter_0000020"
    assert verify(directory) == []
    for path in directory.iterdir():
        content = path.read_bytes()
        for size in [*range(0, len(content), step), len(content) - 1]:
            path.write_bytes(content[:size])
            assert any(path.name in problem for problem in verify(directory)), (path, size)
        path.write_bytes(content)
    assert verify(directory) == []


def test_a_truncated_shard_is_not_loaded(root):
    path = shard(root)
    content = path.read_bytes()
    for size in [*range(0, len(content), 297), len(content) - 1]:
        path.write_bytes(content[:size])
        assert_refused(root, path, "damaged")
    path.write_bytes(content + b"\0")
    assert_refused(root, path, "damaged")


def test_every_flipped_byte_of_the_data_is_detected(root):
    path = shard(root)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for position in range(header, len(content), 41):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        assert_refused(root, path, "checksum")
        with pytest.raises(CheckpointError, match="checksum"):
            read_tensors(root)


def test_every_flipped_byte_and_truncation_of_the_metadata_is_detected(root):
    path = root / "iter_0000020" / "metadata.json"
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1
        for text in (bytes(damaged), content[:position]):
            with pytest.raises(CheckpointError, match="metadata.json"):
                decode_metadata(text, str(path))
    path.write_bytes(content[: len(content) // 2])
    assert_refused(root, path)


def test_missing_parts_name_the_file_and_what_can_be_used(root):
    path = shard(root)
    path.unlink()
    assert_refused(root, path)
    (root / "iter_0000020" / "metadata.json").unlink()
    assert_refused(root, "iteration 20", "never completed", "complete checkpoints there: 10")
    assert complete_iterations(root) == [10]


@pytest.mark.parametrize(
    "text", [b"", b"garbage", b"-3", b"1.5", b"\xff\xfe", "٣".encode(), b"9" * 99]
)
def test_a_garbled_pointer_is_an_error_with_a_remedy(root, text):
    (root / POINTER).write_bytes(text)
    with pytest.raises(CheckpointError, match="10, 20"):
        latest_iteration(root)
    assert_refused(root, POINTER, "10, 20")


def test_the_pointer_may_be_edited_by_hand(root):
    (root / POINTER).write_text("10\n")
    assert latest_iteration(root) == 10
    target = {key: torch.zeros_like(value) for key, value in state(0).items()}
    assert load(root, target).iteration == 10
    (root / POINTER).write_text("15")
    assert_refused(root, "iteration 15", "10, 20")


def test_absent_checkpoints(tmp_path):
    assert latest_iteration(tmp_path / "nowhere") is None
    assert latest_iteration(tmp_path) is None
    assert_refused(tmp_path / "nowhere", "no directory")
    assert_refused(tmp_path, POINTER)


def rewrite(root, change):
    """Change the metadata like someone who knows how to make its checksum."""
    path = root / "iter_0000020" / "metadata.json"
    body = json.loads(path.read_bytes())
    del body["sha256"]
    change(body)
    head = json.dumps(body)[:-1].encode()
    checksum = hashlib.sha256(head).hexdigest().encode()
    path.write_bytes(head + b',\n"sha256": "' + checksum + b'"}\n')


def _chunk(body):
    return body["tensors"]["model.a"]["chunks"][0]


def _escape(body, name):
    old = _chunk(body)["file"]
    body["files"][name] = body["files"].pop(old)
    for record in body["tensors"].values():
        for chunk in record["chunks"]:
            chunk["file"] = name


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda body: _escape(body, "../x.safetensors"), "not allowed"),
        (lambda body: _escape(body, "/etc/x.safetensors"), "not allowed"),
        (lambda body: _escape(body, ".hidden.safetensors"), "not allowed"),
        (lambda body: _escape(body, "x.pt"), "not allowed"),
        (lambda body: _chunk(body).update(file="other.safetensors"), "not among the files"),
        (lambda body: _chunk(body).update(bytes=[0, 2**62]), "claims bytes"),
        (lambda body: _chunk(body).update(sizes=[2**62, 5]), "claims bytes"),
        (lambda body: _chunk(body).update(offsets=[1, 0]), "outside of it"),
        (lambda body: _chunk(body).update(offsets=[-1, 0]), "not a natural number"),
        (lambda body: _chunk(body).update(crc32="zz"), "checksum"),
        (lambda body: body["tensors"]["model.a"].update(shape=[2**62]), "outside of it"),
        (lambda body: body["tensors"]["model.a"].update(shape=[41, 5]), "of its 205 elements"),
        (lambda body: body["tensors"]["model.a"].update(dtype="C64"), "unknown element type"),
        (
            lambda body: body["tensors"].update({"c": body["tensors"]["model.a"]}),
            "share bytes",
        ),
        (lambda body: body.update(version=2), "format version is 2"),
        (lambda body: body.update(format="zip"), "not a checkpoint of mcore"),
        (lambda body: body.update(iteration="20"), "not a natural number"),
        (lambda body: body.update(tensors=[]), "not an object"),
    ],
)  # fmt: skip
def test_metadata_that_lies_is_refused(root, change, complaint):
    rewrite(root, change)
    assert_refused(root, "metadata.json", complaint)


def test_files_never_lead_outside(root, tmp_path_factory):
    path = shard(root)
    outside = tmp_path_factory.mktemp("outside") / "x.safetensors"
    path.rename(outside)
    path.symlink_to(outside)
    assert_refused(root, path)
    assert_refused(root, "it is a link; a checkpoint's files must be regular files")


def test_larger_sizes_than_the_file_take_no_memory(root):
    """The record of the file lies too: its real size is looked at before memory is taken."""

    def change(body):
        record = body["tensors"]["model.a"]
        record["shape"] = _chunk(body)["sizes"] = [2**40, 5]
        start = _chunk(body)["bytes"][0]
        _chunk(body)["bytes"] = [start, start + 2**40 * 20]
        for file in body["files"].values():
            file["bytes"] = 2**45
        body["tensors"].pop("model.b")

    rewrite(root, change)
    with pytest.raises(CheckpointError, match="damaged: it has"):
        read_tensors(root)


class _Bomb:
    def __reduce__(self):
        return (os.mkdir, ("bomb-went-off",))


def test_a_pickle_is_never_executed(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    payload = pickle.dumps(_Bomb())
    shard(root).write_bytes(payload)
    assert_refused(root)
    (root / "iter_0000020" / "metadata.json").write_bytes(payload)
    assert_refused(root)
    (root / POINTER).write_bytes(payload)
    assert_refused(root)
    assert not (tmp_path / "bomb-went-off").exists()


def loads(root, value):
    target = {key: torch.zeros_like(v) for key, v in state(0).items()}
    load(root, target)
    return all(torch.equal(target[key], v) for key, v in state(value).items())


@pytest.mark.parametrize("point", ["publish", "point_to"])
@pytest.mark.parametrize("iteration", [20, 30])
def test_a_failure_at_any_step_leaves_a_complete_checkpoint(root, monkeypatch, point, iteration):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver, point, fail)
    with pytest.raises(CheckpointError, match="No space left"):
        save(root, iteration, state(99), {})
    monkeypatch.undo()
    assert latest_iteration(root) == 20
    overwritten = iteration == 20 and point == "point_to"
    assert loads(root, 99 if overwritten else 20)
    save(root, iteration, state(5), {})
    assert loads(root, 5)
    # The leftovers of the failed save are gone.
    assert len(list((root / f"iter_{iteration:07d}").iterdir())) == 2


def test_a_full_disk_while_a_shard_is_written(root, monkeypatch):
    real = os.fsync

    def fail(descriptor):
        if "shard" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(shard_file.os, "fsync", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        save(root, 20, state(99), {})
    monkeypatch.undo()
    assert loads(root, 20)
    assert len(list((root / "iter_0000020").iterdir())) == 2


KILLED = """
import os, signal, sys, torch
from mcore.checkpoint import save, saver
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
setattr(saver, sys.argv[2], die)
save(sys.argv[1], int(sys.argv[3]), {"model.a": torch.full((40, 5), 99.0)}, {})
"""


@pytest.mark.parametrize(
    ("point", "iteration"), [("publish", 20), pytest.param("point_to", 30, marks=pytest.mark.full)]
)
def test_sigkill_between_the_steps(root, point, iteration):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(root), point, str(iteration)], timeout=300
    )
    assert done.returncode == -signal.SIGKILL
    assert latest_iteration(root) == 20
    assert loads(root, 20)
    save(root, iteration, state(5), {})
    assert loads(root, 5)
    assert len(list((root / f"iter_{iteration:07d}").iterdir())) == 2
