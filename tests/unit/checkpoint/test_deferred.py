"""Tensors that are made when they are written: the same checkpoint, one of them in memory."""

import gc
import time
import weakref

import pytest
import torch

from mcore.checkpoint import read_tensors, save, sharded_tensor
from mcore.checkpoint.deferred import DeferredTensor
from mcore.errors import CheckpointError


def test_one_is_made_at_a_time_and_the_bytes_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded_tensor, "CHUNK_BYTES", 64)
    shapes = {f"model.{i}": (5 + i, 8) for i in range(6)} | {"model.scalar": (), "model.none": (0,)}
    wanted = {key: torch.randn(shape) for key, shape in shapes.items()}
    alive = weakref.WeakSet()
    most = []

    def make(key):
        end = time.monotonic() + 10
        while len(alive) > 1 and time.monotonic() < end:  # the hashing thread may still hold one
            gc.collect()
            time.sleep(0.001)
        gc.collect()
        most.append(len(alive))
        alive.add(tensor := wanted[key].clone())
        return tensor

    state = {
        key: DeferredTensor(key, torch.empty(shape, device="meta"), lambda key=key: make(key))
        for key, shape in shapes.items()
    }
    save(tmp_path, 0, state, {})
    stored = read_tensors(tmp_path)
    assert all(torch.equal(stored[key], tensor) for key, tensor in wanted.items())
    assert len(most) == len(shapes)  # each made once
    assert max(most) <= 2  # the hashing thread may still hold the one before


@pytest.mark.parametrize("made", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)])
def test_another_shape_than_was_said_is_an_error(tmp_path, made):
    like = torch.empty(2, 3, device="meta")
    with pytest.raises(CheckpointError, match="was said to be"):
        save(tmp_path, 0, {"model.x": DeferredTensor("model.x", like, lambda: made)}, {})
    assert not list(tmp_path.rglob("*.json"))
