"""Loading reads what a rank needs and takes memory for little more than that."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from mcore.checkpoint import Rectangle, ShardedTensor, load, save, shard_reader, sharded_tensor
from mcore.testing import run_distributed

LAYERS, ROWS, COLUMNS = 8, 64, 32
LAYER_BYTES = ROWS * COLUMNS * 4


def tensors():
    return {f"model.{i}": torch.full((ROWS, COLUMNS), float(i)) for i in range(LAYERS)}


def _bytes_read(root, parts):
    """Load this rank's part and count the bytes of shards that were read."""
    counted = 0
    read = os.preadv

    def counting(descriptor, buffers, offset):
        nonlocal counted
        count = read(descriptor, buffers, offset)
        counted += count
        return count

    state = parts(dist.get_rank())
    shard_reader.os.preadv = counting
    try:
        load(root, state, allow_missing=True)
    finally:
        shard_reader.os.preadv = read
    for key, tensor in state.items():
        boxes = tensor.rectangles if isinstance(tensor, ShardedTensor) else [Rectangle((), tensor)]
        assert all((box.data == float(key.split(".")[1])).all() for box in boxes)
    return counted


def _half_of_the_layers(rank):
    half = LAYERS // 2
    return {f"model.{i}": torch.zeros(ROWS, COLUMNS) for i in range(rank * half, (rank + 1) * half)}


def _half_of_the_rows(rank):
    half = ROWS // 2
    return {
        f"model.{i}": ShardedTensor(
            f"model.{i}",
            (ROWS, COLUMNS),
            torch.float32,
            [Rectangle((rank * half, 0), torch.zeros(half, COLUMNS))],
        )
        for i in range(LAYERS)
    }


def _some_rows_of_one(rank):
    boxes = [Rectangle((10 + 22 * rank, 0), torch.zeros(20, COLUMNS))]
    return {"model.3": ShardedTensor("model.3", (ROWS, COLUMNS), torch.float32, boxes)}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        (_half_of_the_layers, LAYERS // 2 * LAYER_BYTES),
        (_half_of_the_rows, LAYERS * LAYER_BYTES // 2),
        (_some_rows_of_one, LAYER_BYTES // 2),  # 20 rows that touch 2 of 4 chunks
    ],
)
def test_bytes_that_a_rank_reads(tmp_path, monkeypatch, parts, wanted):
    """Once to check them before anything changes, once to take them; nothing else."""
    monkeypatch.setattr(sharded_tensor, "CHUNK_BYTES", LAYER_BYTES // 4)
    save(tmp_path, 1, tensors(), {})
    assert run_distributed(_bytes_read, 2, tmp_path, parts) == [2 * wanted] * 2


PEAK = """
import resource, sys, torch
from mcore.checkpoint import load, read_tensors, shard_reader
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
read_tensors(sys.argv[1], ["model.none"])  # whatever the first call needs
before = peak()
load(sys.argv[1], {"model.3": torch.zeros(8, 2**18)}, allow_missing=True)
print(peak() - before)
"""


def test_memory_that_loading_takes(tmp_path, monkeypatch):
    """8 MB of 64 MB: these 8 MB, three buffers of a chunk of 1 MB, and change."""
    monkeypatch.setattr(sharded_tensor, "CHUNK_BYTES", 2**20)
    state = {f"model.{i}": torch.full((8, 2**18), float(i)) for i in range(8)}
    save(tmp_path, 1, state | {"model.none": torch.zeros(1)}, {})
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert 8 <= float(done.stdout) < 8 + 3 + 12
