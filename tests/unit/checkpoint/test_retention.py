"""What stays on disk: against lists written out by hand, and with files of others in the way."""

import contextlib
import itertools
import shutil
from pathlib import Path

import pytest
import torch

from mcore.checkpoint import (
    Aftercare,
    CheckpointReader,
    Retention,
    candidates,
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
        # 20 was found damaged: it is none of the two, and goes when 10 does
        (Retention(keep_latest=2, damaged=frozenset({20})), [10, 20, 25], 25, []),
        (Retention(keep_latest=2, damaged=frozenset({20})), [10, 20, 25, 30], 30, [10, 20]),
        (Retention(keep_latest=2, damaged=frozenset({10, 20})), [5, 10, 20, 25], 25, []),
        (Retention(keep_latest=1, keep_every=20, damaged=frozenset({20})), [10, 20, 25], 25, [10]),
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


def test_one_that_was_found_damaged_does_not_count_as_left(tmp_path):
    """20 is kept for good, but it is damaged: 25 is read back before 10 goes."""
    write(tmp_path, 10, 20, 25)
    one_bit(next((tmp_path / "iter_0000025").glob("*.safetensors")))
    retention = Retention(keep_latest=1, keep_every=20, damaged=frozenset({20}))
    with pytest.raises(DamagedCheckpointError):
        Aftercare(retention=retention).apply(tmp_path / "iter_0000025")
    assert complete_iterations(tmp_path) == [10, 20, 25]
    assert latest_iteration(tmp_path) == 10


class Died(BaseException):
    """Nothing in a process that is killed can catch it."""


def dies_at(monkeypatch, number):
    """Let the process die where it would delete something for the `number`th time."""
    calls = []

    def dying(real):
        def delete(*args, **keywords):
            calls.append(args)
            if len(calls) == number:
                raise Died
            return real(*args, **keywords)

        return delete

    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))
    return calls


def test_a_process_that_dies_while_it_deletes(tmp_path, monkeypatch):
    """Before each deletion in turn: a restart finds the newest whole, and deletes the rest."""
    start, later = tmp_path / "start", tmp_path / "later"
    write(start, 2, 4, 6)
    for left in ("shard_00001.ab.safetensors", ".metadata.json.replaced"):
        for iteration in (2, 6):
            (start / f"iter_000000{iteration}" / left).write_bytes(b"died")
    write(later, 8)
    for number in itertools.count(1):
        root = shutil.copytree(start, tmp_path / f"{number}")
        care = Aftercare(retention=Retention(keep_latest=1))
        with monkeypatch.context() as patch:
            calls = dies_at(patch, number)
            with contextlib.suppress(Died):
                care.apply(root / "iter_0000006")
        left = complete_iterations(root)
        assert 6 in left
        assert [verify(root / f"iter_000000{iteration}") for iteration in left] == [[]] * len(left)
        found, remarks = candidates(root)
        assert (found[0].name, remarks) == ("iter_0000006", [])
        assert read_tensors(root)["model.a"].tolist() == [6.0] * 4
        shutil.copytree(later, root, dirs_exist_ok=True)
        care.apply(root / "iter_0000008")
        names = sorted(path.name for path in root.iterdir())
        assert names == ["iter_0000008", "latest_checkpointed_iteration.txt"]
        if len(calls) < number:
            break
    assert number > 12


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
