"""What stays on disk: against lists written out by hand, and with files of others in the way."""

import shutil

import pytest
import torch

from mcore.checkpoint import (
    Aftercare,
    CheckpointReader,
    Retention,
    complete_iterations,
    latest_iteration,
    leftovers,
    read_tensors,
    save,
    unfinished_iterations,
    verify,
)
from mcore.errors import CheckpointError, DamagedCheckpointError


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
    for left in ("shard_00000.ab.safetensors", "..metadata.json.replaced.tmp"):
        (tmp_path / "iter_0000003" / left).write_bytes(b"died")
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


def one_bit(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def test_the_only_one_left_is_read_back_first(tmp_path):
    """Of the right size, but not of the right bytes: with two left it is taken on trust."""
    write(tmp_path, 2, 4, 6)
    one_bit(next((tmp_path / "iter_0000006").glob("*.safetensors")))
    Aftercare(retention=Retention(keep_latest=2)).apply(tmp_path / "iter_0000006")
    assert complete_iterations(tmp_path) == [4, 6]
    with pytest.raises(DamagedCheckpointError, match="not on the disk as it was written"):
        Aftercare(retention=Retention(keep_latest=1)).apply(tmp_path / "iter_0000006")
    assert complete_iterations(tmp_path) == [4, 6]
    assert latest_iteration(tmp_path) == 4


def test_one_beyond_the_newest_does_not_count_as_left(tmp_path):
    """30 was found damaged, the run went back to 20 and has saved 25, which is damaged as well."""
    write(tmp_path, 20, 25, 30)
    one_bit(next((tmp_path / "iter_0000025").glob("*.safetensors")))
    with pytest.raises(DamagedCheckpointError):
        Aftercare(retention=Retention(keep_latest=1)).apply(tmp_path / "iter_0000025")
    assert latest_iteration(tmp_path) == 20


def test_checkpoints_of_megatron_are_left_alone(tmp_path):
    """A `torch_dist` folder has a metadata.json as well; its own metadata is `.metadata`."""
    foreign = tmp_path / "iter_0000003"
    foreign.mkdir()
    for name in ("metadata.json", ".metadata", "__0_0.distcp"):
        (foreign / name).write_text('{"sharded_backend": "torch_dist"}')
    died = tmp_path / "iter_0000001"
    died.mkdir()
    (died / ".metadata").write_text("")
    before = sorted(path.name for path in foreign.iterdir())
    write(tmp_path, 2, 4)
    assert (complete_iterations(tmp_path), unfinished_iterations(tmp_path)) == ([2, 4], [])
    Aftercare(retention=Retention(keep_latest=1)).apply(tmp_path / "iter_0000004")
    assert complete_iterations(tmp_path) == [4]
    with pytest.raises(CheckpointError, match="of another program"):
        write(tmp_path, 3)
    assert sorted(path.name for path in foreign.iterdir()) == before


def test_files_of_others_stay_in_a_directory_that_is_saved_again(tmp_path):
    write(tmp_path, 2)
    directory = tmp_path / "iter_0000002"
    (directory / "mine.safetensors").write_bytes(b"mine")
    (directory / "shard_00000.ab.safetensors").write_bytes(b"died")
    assert leftovers(directory, CheckpointReader(directory).metadata) == [
        "shard_00000.ab.safetensors"
    ]
    write(tmp_path, 2)
    assert sorted(path.name[:6] for path in directory.iterdir()) == ["metada", "mine.s", "shard_"]


def test_what_was_replaced_comes_back_where_the_new_one_is_damaged(tmp_path):
    write(tmp_path, 2)
    directory = tmp_path / "iter_0000002"
    first = next(directory.glob("*.safetensors"))
    save(tmp_path, 2, {"model.a": torch.full((4,), 7.0)}, {}, settle=False)
    one_bit(next(path for path in directory.glob("*.safetensors") if path != first))
    with pytest.raises(DamagedCheckpointError):
        Aftercare(verify=True).apply(directory)
    assert latest_iteration(tmp_path) == 2
    assert verify(directory) == []
    assert read_tensors(tmp_path)["model.a"].tolist() == [2.0] * 4
    save(tmp_path, 2, {"model.a": torch.full((4,), 7.0)}, {}, settle=False)
    Aftercare(verify=True).apply(directory)
    assert read_tensors(tmp_path)["model.a"].tolist() == [7.0] * 4
    assert sorted(path.suffix for path in directory.iterdir()) == [".json", ".safetensors"]
