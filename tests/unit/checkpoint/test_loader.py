"""Round trips within one process, against values cut by plain indexing."""

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from mcore.checkpoint import (
    CheckpointReader,
    RankLocal,
    Rectangle,
    ShardedTensor,
    load,
    read_common,
    read_tensors,
    save,
    sharded_tensor,
)
from mcore.errors import CheckpointError

from .layouts import VOCAB, cut, global_values, group_of, joined, sharded

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("chunk_bytes", [1000, 2**25])
def test_reshard_ring_is_bit_equal_and_padding_becomes_zero(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(sharded_tensor, "CHUNK_BYTES", chunk_bytes)
    values = global_values()
    local = [cut(values, group_of(1, 0))]
    for step, tp in enumerate([1, 2, 4, 2, 1]):
        groups = [group_of(tp, rank) for rank in range(tp)]
        if step:
            local = [cut({k: v + 0.5 for k, v in values.items()}, group) for group in groups]
            parts = [sharded(part, group, False) for part, group in zip(local, groups, strict=True)]
            load(tmp_path, joined(parts))
            for part, group in zip(local, groups, strict=True):
                rows = part["embedding"].shape[0]
                used = min(rows, max(0, VOCAB - group.rank * rows))
                assert not part["embedding"][used:].any()
                part["embedding"][used:] = -777.0
                wanted = cut(values, group)
                assert all(torch.equal(part[name], wanted[name]) for name in wanted)
        parts = [sharded(part, group, True) for part, group in zip(local, groups, strict=True)]
        save(tmp_path, step, joined(parts), {})
        whole = read_tensors(tmp_path)
        assert whole.keys() == {f"model.{name}" for name in values}
        assert all(torch.equal(whole[f"model.{name}"], values[name]) for name in values)


def test_bit_patterns_of_every_type(tmp_path):
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for dtype in DTYPES:
        raw = torch.randint(0, 256, (3, 8 * dtype.itemsize), dtype=torch.uint8, generator=generator)
        name = str(dtype).removeprefix("torch.")
        tensors[f"t.{name}"] = raw % 2 == 0 if dtype is torch.bool else raw.view(dtype)
    tensors["t.nan"] = torch.tensor([0x7FC1, 0xFF81, 0x0001, 0x8000]).short().view(torch.bfloat16)
    tensors["t.scalar"] = torch.tensor(-0.0)
    tensors["t.empty"] = torch.zeros(0, 4)
    tensors["t.transposed"] = torch.arange(12.0).reshape(3, 4).T
    save(tmp_path, 3, tensors, {})
    fresh = {key: torch.zeros_like(value).contiguous() for key, value in tensors.items()}
    load(tmp_path, fresh)
    for key, value in tensors.items():
        assert torch.equal(bits(fresh[key]), bits(value)), key
        assert torch.equal(bits(read_tensors(tmp_path, [key])[key]), bits(value)), key


def test_readable_with_json_and_safetensors_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded_tensor, "CHUNK_BYTES", 4096)
    values = global_values()
    groups = [group_of(2, rank) for rank in range(2)]
    parts = [sharded(cut(values, group), group, True) for group in groups]
    save(tmp_path, 12, joined(parts), {"a": [1, {"b": 0.1}]})
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_bytes() == b"12"
    folder = tmp_path / "iter_0000012"
    meta = json.loads((folder / "metadata.json").read_text())
    assert (meta["format"], meta["version"], meta["iteration"]) == ("mcore-checkpoint", 1, 12)
    assert meta["common"] == {"a": [1, {"b": 0.1}]}
    for key, record in meta["tensors"].items():
        out = torch.full(record["shape"], -1.0, dtype=torch.float64)
        assert record["dtype"] == "F64"
        for chunk in record["chunks"]:
            start, end = chunk["bytes"]
            raw = (folder / chunk["file"]).read_bytes()[start:end]
            assert f"{zlib.crc32(raw):08x}" == chunk["crc32"]
            with safe_open(folder / chunk["file"], "pt") as file:
                data = file.get_tensor(chunk["name"])
            assert data.numpy().tobytes() == raw
            spans = zip(chunk["offsets"], chunk["sizes"], strict=True)
            out[tuple(slice(o, o + n) for o, n in spans)] = data
        assert torch.equal(out, values[key.removeprefix("model.")])
    for name, record in meta["files"].items():
        shown = subprocess.run(["sha256sum", folder / name], capture_output=True, text=True)
        assert shown.stdout.split()[0] == record["sha256"]
        assert (folder / name).stat().st_size == record["bytes"]


def test_the_reader_of_the_format_page_works(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded_tensor, "CHUNK_BYTES", 64)
    page = (Path(__file__).parents[3] / "docs" / "checkpoint_format.md").read_text()
    scope = {}
    exec(page.split("```python\n")[1].split("```")[0], scope)
    tensor = torch.arange(60.0).reshape(12, 5)
    save(tmp_path, 1, {"model.a": tensor, "model.s": torch.tensor(3)}, {})
    assert torch.equal(scope["read"](tmp_path / "iter_0000001", "model.a"), tensor)
    assert scope["read"](tmp_path / "iter_0000001", "model.s").item() == 3


def test_everything_that_does_not_fit_is_listed_and_nothing_changes(tmp_path):
    stored = {"model.a": torch.ones(3), "model.b": torch.ones(4), "exp_avg.a": torch.ones(3)}
    save(tmp_path, 1, stored, {"x": 1})
    a, b = torch.zeros(3), torch.zeros(5)
    with pytest.raises(CheckpointError) as info:
        load(tmp_path, {"model.a": a, "model.c": b, "model.d": b})
    text = str(info.value)
    assert "missing in the checkpoint (2): model.c, model.d" in text
    assert "not in the model (1): model.b" in text
    assert not a.any()
    with pytest.raises(CheckpointError, match=r"model.b has shape \[4\], not \[5\]"):
        load(tmp_path, {"model.a": a, "model.b": b}, allow_missing=True)
    with pytest.raises(CheckpointError, match=r"model.a is torch.float32, not torch.int64"):
        load(tmp_path, {"model.a": a.long(), "model.b": b[:4]})
    result = load(tmp_path, {"model.a": a, "model.c": b}, allow_missing=True)
    assert result.missing == ("model.c",)
    assert result.unexpected == ("exp_avg.a", "model.b")
    assert (result.iteration, result.common) == (1, {"x": 1})
    assert a.all()
    # A family that nobody asks for may stay unread.
    assert load(tmp_path, {"model.a": a, "model.b": b[:4]}).unexpected == ("exp_avg.a",)
    # Nor need a part of one be read where that is said.
    assert load(tmp_path, {"model.a": a}, partial=["model"]).unexpected == ("exp_avg.a", "model.b")


def test_another_key_may_stand_in(tmp_path):
    """One for an absent key, one for a rounded one; neither counts as unread."""
    precise = torch.tensor([1.0, 2**-20 + 1])
    stored = {"model.a": precise.bfloat16(), "main_param.a": precise, "model.b": precise}
    save(tmp_path, 1, stored, {})
    target = {key: torch.zeros(2) for key in ("model.a", "model.b", "main_param.b")}
    stand_ins = {"model.a": "main_param.a", "main_param.b": "model.b"}
    result = load(tmp_path, target, source=lambda key, _: stand_ins.get(key, key))
    assert result.unexpected == ()
    assert all(torch.equal(tensor, precise) for tensor in target.values())
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint \(1\): model.b"):
        load(tmp_path, target, source=lambda key, _: (stand_ins | {"model.b": "c"}).get(key, key))


def test_floating_point_types_convert_on_load(tmp_path, caplog):
    caplog.set_level("INFO", "mcore")
    save(tmp_path, 1, {"model.a": torch.tensor([1.0, 2**-20 + 1])}, {})
    target = torch.zeros(2, dtype=torch.bfloat16)
    load(tmp_path, {"model.a": target})
    assert target.tolist() == [1.0, 1.0]
    assert "1 tensors are converted from torch.float32 to torch.bfloat16" in caplog.text


def test_a_parameter_that_requires_grad_is_filled_in_place(tmp_path):
    save(tmp_path, 1, {"model.a": torch.arange(4.0)}, {})
    parameter = torch.nn.Parameter(torch.zeros(4))
    address = parameter.data_ptr()
    load(tmp_path, {"model.a": parameter})
    assert parameter.tolist() == [0, 1, 2, 3]
    assert parameter.data_ptr() == address
    assert parameter.grad_fn is None


def test_rank_local_state_belongs_to_its_layout(tmp_path):
    layout = {"tp": 1, "order": "tp-cp-dp-pp"}
    state = torch.get_rng_state()
    save(
        tmp_path, 1, {"model.a": torch.ones(1)}, {},
        rank_local=RankLocal(3, layout, {"rng": state}),
    )  # fmt: skip
    assert CheckpointReader(tmp_path).keys() == ["model.a", "rng.rank_00003"]
    fresh = {"model.a": torch.zeros(1)}
    found = load(tmp_path, fresh, rank_local=RankLocal(3, layout)).rank_local
    assert found is not None
    assert torch.equal(found["rng"], state)
    other = load(tmp_path, fresh, rank_local=RankLocal(3, {**layout, "tp": 2}))
    assert other.rank_local is None
    assert other.unexpected == ()
    assert load(tmp_path, fresh, rank_local=RankLocal(2, layout)).rank_local is None


def test_a_chosen_iteration_and_an_iteration_directory(tmp_path):
    for i in (5, 7):
        save(tmp_path, i, {"model.a": torch.full((2,), float(i))}, {"i": i})
    assert read_common(tmp_path) == {"i": 7}
    assert read_common(tmp_path, 5) == {"i": 5}
    assert read_common(tmp_path / "iter_0000005") == {"i": 5}
    target = torch.zeros(2)
    assert load(tmp_path, {"model.a": target}, iteration=5).iteration == 5
    assert target.tolist() == [5, 5]


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path):
    tensor = {"model.a": torch.ones(2)}
    wrong = [({"x": object()}, "JSON"), ({"x": float("nan")}, "JSON"), ({"x": {1: 2}}, "keys")]
    for common, complaint in wrong:
        with pytest.raises(CheckpointError, match=complaint):
            save(tmp_path, 1, tensor, common)
    with pytest.raises(CheckpointError, match="complex64"):
        save(tmp_path, 1, {"model.a": torch.ones(2, dtype=torch.complex64)}, {})
    with pytest.raises(CheckpointError, match="says that its key is"):
        save(tmp_path, 1, {"model.a": ShardedTensor("model.b", (2,), torch.float32, [])}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_gap_or_an_overlap_is_refused(tmp_path):
    half = ShardedTensor("k", (4,), torch.float32, [Rectangle((0,), torch.ones(2))])
    with pytest.raises(CheckpointError, match="2 of its 4 elements"):
        save(tmp_path, 1, {"k": half}, {})
    twice = half.joined(ShardedTensor("k", (4,), torch.float32, [Rectangle((1,), torch.ones(2))]))
    with pytest.raises(CheckpointError, match="overlap"):
        save(tmp_path, 1, {"k": twice}, {})
    assert list(tmp_path.glob("*/*")) == []


def test_no_pickle_is_imported_or_reachable():
    folder = Path(sys.modules["mcore.checkpoint"].__file__).parent
    for path in folder.glob("*.py"):
        text = path.read_text()
        assert "import pickle" not in text
        assert "torch.load" not in text
