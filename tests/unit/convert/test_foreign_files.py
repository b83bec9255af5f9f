"""Pickles of other programs: old ones are read, and none takes more memory than it has bytes."""

import argparse
import io
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mcore.convert.deepspeed_weights import read_ranks
from mcore.convert.megatron_legacy import read_legacy
from mcore.convert.old_torch_file import names_in_old_file
from mcore.convert.safe_pickle import load_torch_file
from mcore.errors import CheckpointError

GOLDEN = Path(__file__).parents[2] / "golden"


def save_old(content, path):
    """As torch did before its version 1.6."""
    torch.save(content, path, _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(path)


def test_a_checkpoint_from_before_archives(tmp_path):
    source = GOLDEN / "checkpoints" / "gpt" / "legacy_tp2_pp1"
    shutil.copytree(source, tmp_path / "old")
    for path in (tmp_path / "old").rglob("model_optim_rng.pt"):
        content = load_torch_file(path, "here")
        content["args"] = argparse.Namespace(**vars(content["args"]))
        content["rng_state"] = {"np_rng_state": np.random.RandomState(1).get_state()}
        save_old(content, path.with_name("new"))  # what was loaded is mapped
        path.with_name("new").replace(path)
    stored = load_file(GOLDEN / "model" / "megatron_gpt.safetensors")
    _, tensors = read_legacy(tmp_path / "old")
    assert len(tensors) > 10
    assert all(torch.equal(tensor, stored[f"weight.{name}"]) for name, tensor in tensors.items())


class Payload:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (open, (str(self.trace), "w"))


def test_code_in_an_old_file_is_refused_by_name_and_not_run(tmp_path):
    save_old({"model": {"a": torch.ones(3)}, "evil": Payload(tmp_path / "trace")}, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"wants to load (_?io|builtins)\.open"):
        load_torch_file(tmp_path / "x", "x")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("size", [0, 1, 20, 100, 400])
def test_the_beginning_of_an_old_file(tmp_path, size):
    save_old({"a": torch.ones(300)}, tmp_path / "x")
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:size])
    with pytest.raises(CheckpointError):
        load_torch_file(tmp_path / "x", "x")


class Huge(pickle.Pickler):
    def persistent_id(self, value):
        if value == "here":
            return ("storage", torch.FloatStorage, "0", "cpu", 10**12, None)
        return None


def test_an_old_file_that_claims_memory(tmp_path):
    with (tmp_path / "x").open("wb") as file:
        for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
            pickle.dump(value, file, protocol=2)
        Huge(file, protocol=2).dump({"a": "here"})
        pickle.dump(["0"], file, protocol=2)
    with pytest.raises(CheckpointError, match="would take 4000000000000 bytes"):
        names_in_old_file(tmp_path / "x")
    with pytest.raises(CheckpointError, match="would take 4000000000000 bytes"):
        load_torch_file(tmp_path / "x", "x")


def test_tensors_that_repeat_the_bytes_of_a_file(tmp_path):
    element = torch.ones(1)
    torch.save({"model": [element.expand(2**20, 2**20)]}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="its tensors claim"):
        load_torch_file(tmp_path / "x", "x")
    block = torch.ones(2**18)
    torch.save({"a": block, "b": argparse.Namespace(b=[block])}, tmp_path / "x")
    assert load_torch_file(tmp_path / "x", "x")["a"].sum() == 2**18  # shared, as a tied embedding
    torch.save([block.view(-1) for _ in range(20)], tmp_path / "x")
    with pytest.raises(CheckpointError, match="its tensors claim"):
        load_torch_file(tmp_path / "x", "x")


@pytest.mark.parametrize("in_memory", [False, True])
def test_an_archive_that_unpacks_to_more_than_it_is(tmp_path, in_memory):
    torch.save({"a": torch.zeros(2**20)}, tmp_path / "x")
    with (
        zipfile.ZipFile(tmp_path / "x") as plain,
        zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    path = tmp_path / "packed"
    file = io.BytesIO(path.read_bytes()) if in_memory else path
    with pytest.raises(CheckpointError, match="would unpack to"):
        load_torch_file(file, "x")


def test_pointers_that_are_no_text(tmp_path):
    for name, read in (("latest_checkpointed_iteration.txt", read_legacy), ("latest", read_ranks)):
        (tmp_path / name).write_bytes(b"\xff\xfe7")
        with pytest.raises(CheckpointError, match="cannot read"):
            read(tmp_path)
