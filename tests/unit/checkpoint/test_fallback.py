"""Where a run starts when the newest checkpoint is damaged."""

import hashlib
import logging

import pytest
import torch

from mcore.checkpoint import (
    Rectangle,
    ShardedTensor,
    candidates,
    first_good,
    load,
    save,
)
from mcore.checkpoint.commit import iteration_directory
from mcore.errors import CheckpointError, DamagedCheckpointError
from mcore.testing import run_distributed


class Lines(logging.Handler):
    """What is logged as a warning or an error."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


POINTER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def root(tmp_path):
    for iteration in (2, 4, 6):
        save(tmp_path, iteration, {"model.a": torch.full((50,), float(iteration))}, {})
    return tmp_path


def loaded(root, **options):
    """What a load ends up with; a target that a failed attempt had touched would show."""
    target = torch.zeros(50)

    def attempt(directory):
        assert not target.any()
        load(directory, {"model.a": target})

    first_good(root, attempt, **options)
    assert (target == target[0]).all()
    return int(target[0])


def shard(root, iteration):
    return next(iteration_directory(root, iteration).glob("*.safetensors"))


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped byte": lambda root: flip(shard(root, 6), -1),
    "truncated": lambda root: shard(root, 6).write_bytes(shard(root, 6).read_bytes()[:-1]),
    "empty": lambda root: shard(root, 6).write_bytes(b""),
    "no shard": lambda root: shard(root, 6).unlink(),
    "no metadata": lambda root: (iteration_directory(root, 6) / "metadata.json").unlink(),
    "flipped metadata": lambda root: flip(iteration_directory(root, 6) / "metadata.json", 90),
    "pointer to nothing": lambda root: (root / POINTER).write_text("5"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_one_before_is_used(root, damage):
    DAMAGE[damage](root)
    assert loaded(root) == 4
    with pytest.raises(DamagedCheckpointError):
        loaded(root, fall_back=False)
    with pytest.raises(CheckpointError):  # who asks for one gets that one
        loaded(root, iteration=5 if damage == "pointer to nothing" else 6)


@pytest.mark.parametrize("text", ["", "garbage", "-4", "6\n6", None])
def test_without_a_pointer_the_newest_complete_one_is_used(root, text):
    (root / POINTER).unlink()
    if text is not None:
        (root / POINTER).write_text(text)
    assert loaded(root) == 6


def test_an_iteration_that_lost_its_metadata_is_named(root):
    DAMAGE["no metadata"](root)
    directory = iteration_directory(root, 6)
    with pytest.raises(DamagedCheckpointError, match=r"iter_0000006 has no metadata\.json"):
        load(directory, {"model.a": torch.zeros(50)})


def test_an_unfinished_one_is_reported_and_a_newer_one_is_left_alone(root):
    (root / POINTER).write_text("4")
    (root / "iter_0000009").mkdir()
    found, remarks = candidates(root)
    assert [path.name for path in found] == ["iter_0000004", "iter_0000002"]
    assert remarks == [f"iteration 9 in {root} was never finished and is not used"]


def test_two_damaged_ones_and_none_left(root):
    for iteration in (6, 4):
        flip(shard(root, iteration), -1)
    assert loaded(root) == 2
    flip(shard(root, 2), -1)
    with pytest.raises(DamagedCheckpointError, match="checksum.*the last of 3, and none of"):
        loaded(root)


def test_what_is_not_damage_is_an_error(root):
    path = iteration_directory(root, 6) / "metadata.json"
    text = path.read_bytes().replace(b'"version": 1', b'"version": 2')
    head = text.rpartition(b',\n"sha256": "')[0]
    path.write_bytes(head + b',\n"sha256": "' + hashlib.sha256(head).hexdigest().encode() + b'"}\n')
    with pytest.raises(CheckpointError, match="version") as info:
        loaded(root)
    assert not isinstance(info.value, DamagedCheckpointError)


def test_who_asks_is_told_what_was_passed_over(root):
    for iteration in (6, 4):
        flip(shard(root, iteration), -1)
    passed = []
    assert loaded(root, on_damage=passed.append) == 2
    assert passed == [iteration_directory(root, number) for number in (6, 4)]


def load_on_three(root):
    rank = torch.distributed.get_rank()
    log, handler = logging.getLogger("mcore"), Lines()
    log.addHandler(handler)
    target = torch.zeros(5, 3)
    part = ShardedTensor("model.w", (15, 3), torch.float32, [Rectangle((rank * 5, 0), target)])
    tried = []

    def attempt(directory):
        tried.append(directory.name)
        assert not target.any()
        load(directory, {"model.w": part})

    first_good(root, attempt)
    log.removeHandler(handler)
    return tried, target[0, 0].item(), handler.lines


@pytest.mark.dist
def test_all_ranks_fall_back_together(tmp_path):
    for iteration in (1, 2):
        save(tmp_path, iteration, {"model.w": torch.full((15, 3), float(iteration))}, {})
    flip(shard(tmp_path, 2), -15 * 3 * 2)
    (tmp_path / "iter_0000009").mkdir()
    results = run_distributed(load_on_three, 3, tmp_path, timeout=60)
    tried, values, told = zip(*results, strict=True)
    assert tried == (["iter_0000002", "iter_0000001"],) * 3
    assert values == (1.0,) * 3
    assert [len(lines) for lines in told] == [2, 0, 0]  # once, not once per rank
    assert "never finished" in told[0][0]
    assert "GOING BACK" in told[0][1]
