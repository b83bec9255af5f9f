"""`mcore ckpt`: exit statuses, damage of every kind, dumps that no layout shows through."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mcore.checkpoint import RankLocal, ShardedTensor, save
from mcore.checkpoint.sharded_tensor import Rectangle
from mcore.cli.main import main
from mcore.testing import run_distributed

COMMON = {
    "iteration": 7,
    "consumed_train_samples": 56,
    "optimizer": {"step_count": 7},
    "model": {"num_layers": 2},
}


def tensors(shift=0.0):
    torch.manual_seed(3)
    weight = torch.randn(6, 4)
    weight[2, 1] += shift
    return {
        "model.w": weight.to(torch.bfloat16),
        "main_param.w": weight,
        "exp_avg.w": weight * 2,
        "exp_avg_sq.w": weight**2,
        "model.scale": torch.tensor(3.0),
    }


def save_rows(root, ranks):
    """Each rank of a job saves its rows; all hold the scalar."""
    rank = torch.distributed.get_rank()
    rows, parts = 6 // ranks, {}
    for key, value in tensors().items():
        if value.dim() == 0:
            parts[key] = value
            continue
        box = Rectangle((rank * rows, 0), value[rank * rows : (rank + 1) * rows])
        parts[key] = ShardedTensor(key, value.shape, value.dtype, [box])
    local = RankLocal(rank, {"dp": ranks}, {"rng": torch.tensor([rank])})
    save(root, 7, parts, COMMON, rank_local=local)


@pytest.fixture
def root(tmp_path):
    save(tmp_path / "one", 7, tensors(), COMMON)
    return tmp_path / "one"


def run(capsys, *words):
    status = main([str(word) for word in words])
    out = capsys.readouterr()
    return status, out.out + out.err


@pytest.mark.dist
def test_dump_does_not_show_the_layout(root, tmp_path, capsys):
    run_distributed(save_rows, 3, tmp_path / "three", 3, timeout=60)
    assert run(capsys, "ckpt", "verify", tmp_path / "three")[0] == 0
    for name in ("one", "three"):
        out = tmp_path / f"{name}.safetensors"
        assert run(capsys, "ckpt", "dump", tmp_path / name, "--out", out)[0] == 0
    content = [(tmp_path / f"{name}.safetensors").read_bytes() for name in ("one", "three")]
    assert content[0] == content[1]
    loaded = load_file(tmp_path / "three.safetensors")
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[key], value) for key, value in tensors().items())
    with safe_open(tmp_path / "three.safetensors", "pt") as file:
        assert json.loads(file.metadata()["optimizer"]) == {"step_count": 7}
        assert file.metadata()["consumed_train_samples"] == "56"
    assert run(capsys, "ckpt", "diff", root, tmp_path / "three") == (0, "the same state\n")


def test_diff_names_what_differs(root, tmp_path, capsys):
    save(tmp_path / "b", 7, tensors(0.5), {**COMMON, "consumed_train_samples": 57})
    status, text = run(capsys, "ckpt", "diff", root, tmp_path / "b")
    assert status == 1
    assert "consumed_train_samples: 56 and 57" in text
    assert "main_param.w: 1 of 24 elements, largest difference 0.5" in text
    assert "scale" not in text


SEGMENTS = [{"start": 0, "weights": {"a": 1.0, "b": 2.0}, "cursors": {}}]
AUTOPILOT = {"windows": [[5, 6]], "left_out": 2, "rollbacks": 1}


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        ({}, {"data_segments": [], "evaluation_is_owed": False, "autopilot": {}}, None),
        ({"data_segments": SEGMENTS, "autopilot": AUTOPILOT}, None, None),
        (
            {"data_segments": SEGMENTS},
            {"data_segments": [{**SEGMENTS[0], "start": 8}]},
            "data_segments.0.start: 0 and 8",
        ),
        (
            {"data_segments": SEGMENTS},
            {"data_segments": [SEGMENTS[0], {"start": 8, "weights": {"a": 1.0}}]},
            "data_segments.1.start: None and 8",
        ),
        ({}, {"evaluation_is_owed": True}, "evaluation_is_owed: None and True"),
        (
            {"autopilot": AUTOPILOT},
            {"autopilot": {**AUTOPILOT, "windows": []}},
            "autopilot.windows: [[5, 6]] and None",
        ),
        ({"autopilot": {"losses": [0.5] * 99}}, {}, f"autopilot.losses: {[0.5] * 24}"[:-1]),
    ],
)
def test_diff_sees_what_decides_the_next_samples_and_steps(tmp_path, capsys, first, second, line):
    for name, more in (("a", first), ("b", first if second is None else second)):
        save(tmp_path / name, 7, tensors(), {**COMMON, **more})
    status, text = run(capsys, "ckpt", "diff", tmp_path / "a", tmp_path / "b")
    assert status == (line is not None)
    assert (line or "the same state") in text
    assert max(map(len, text.splitlines())) < 300


def test_inspect(root, capsys):
    status, text = run(capsys, "ckpt", "inspect", root)
    assert status == 0
    assert "exp_avg.w [6, 4] float32, 1 chunks" in text
    assert "model: 2 tensors, 25 elements, 52 bytes" in text
    state = json.loads(run(capsys, "ckpt", "inspect", root, "--json")[1])
    assert state["tensors"]["main_param.w"]["shape"] == [6, 4]
    assert state["state"] == COMMON


def test_usage_errors_have_status_2(root, tmp_path, capsys):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    for words in (
        ["verify", tmp_path / "absent"],
        ["verify", tmp_path / "hf"],
        ["verify"],
        ["dump", root, "--out", root / "latest_checkpointed_iteration.txt"],
        ["diff", root, tmp_path / "hf"],
    ):
        assert run(capsys, "ckpt", *words)[0] == 2, words


def test_verify_finds_damage_of_every_kind(root, tmp_path, capsys):
    assert run(capsys, "ckpt", "verify", root)[0] == 0
    assert run(capsys, "ckpt", "verify", root / "iter_0000007")[0] == 0
    victim = tmp_path / "victim"
    names = [path.name for path in (root / "iter_0000007").iterdir()]
    for name in names:
        content = (root / "iter_0000007" / name).read_bytes()
        for position in range(0, len(content), 53):
            for damaged in (
                content[:position],
                content[:position] + bytes([content[position] ^ 8]) + content[position + 1 :],
            ):
                shutil.rmtree(victim, ignore_errors=True)
                shutil.copytree(root, victim)
                (victim / "iter_0000007" / name).write_bytes(damaged)
                status, text = run(capsys, "ckpt", "verify", victim)
                assert status == 1, (name, position, text)
                assert name in text
    for name in [*names, "../latest_checkpointed_iteration.txt"]:
        shutil.rmtree(victim, ignore_errors=True)
        shutil.copytree(root, victim)
        (victim / "iter_0000007" / name).unlink()
        assert run(capsys, "ckpt", "verify", victim)[0] == 1, name
    (victim / "latest_checkpointed_iteration.txt").write_text("8")
    assert run(capsys, "ckpt", "verify", victim)[0] == 1
