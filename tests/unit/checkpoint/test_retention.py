"""What stays on disk: against lists written out by hand, and with files of others in the way."""

import shutil

import pytest
import torch

from mcore.checkpoint import Retention, complete_iterations, save
from mcore.errors import CheckpointError


def write(root, *iterations):
    for iteration in iterations:
        save(root, iteration, {"model.a": torch.full((4,), float(iteration))}, {})


@pytest.mark.parametrize(
    ("retention", "iterations", "saved", "doomed"),
    [
        (Retention(), [2, 4, 6], 6, []),
        (Retention(keep_latest=1), [2, 4, 6], 6, [2, 4]),
        (Retention(keep_latest=2), [2, 4, 6], 6, [2]),
        (Retention(keep_latest=5), [2, 4, 6], 6, []),
        (Retention(keep_latest=1, keep_every=4), [2, 4, 6, 8, 10], 10, [2, 6]),
        (Retention(keep_latest=1), [2, 4, 6, 8], 4, [2]),  # 6 and 8 are of a branch left behind
    ],
)
def test_what_goes(retention, iterations, saved, doomed):
    assert retention.doomed(iterations, saved) == doomed


def test_deleting_leaves_files_and_links_of_others(tmp_path):
    write(tmp_path, 2, 4, 6)
    (tmp_path / "iter_0000002" / "notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "iter_0000006", tmp_path / "elsewhere")
    (tmp_path / "iter_0000001").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "iter_0000003" / "shard_00000.ab.safetensors").write_bytes(b"died")
    Retention(keep_latest=1).apply(tmp_path, 6)
    assert complete_iterations(tmp_path) == [1, 6]
    assert [e.name for e in (tmp_path / "iter_0000002").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "iter_0000003").exists()
    assert not (tmp_path / "iter_0000004").exists()
    assert (tmp_path / "elsewhere" / "metadata.json").exists()


@pytest.mark.parametrize("damage", ["shorter shard", "no shard", "metadata"])
def test_nothing_goes_while_the_newest_is_damaged(tmp_path, damage):
    write(tmp_path, 2, 4)
    directory = tmp_path / "iter_0000004"
    shard = next(directory.glob("*.safetensors"))
    if damage == "shorter shard":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "no shard":
        shard.unlink()
    else:
        (directory / "metadata.json").write_text("{}")
    with pytest.raises(CheckpointError):
        Retention(keep_latest=1).apply(tmp_path, 4)
    assert 2 in complete_iterations(tmp_path)
