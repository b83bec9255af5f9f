"""The same on gloo ranks: shared work, resharding, errors that every rank sees."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore.checkpoint import RankLocal, latest_iteration, load, read_tensors, save, saver, storage
from mcore.errors import CheckpointError
from mcore.testing import run_distributed

from .layouts import cut, global_values, group_of, sharded

pytestmark = pytest.mark.dist


def _tp_group(tp):
    return group_of(tp, dist.get_rank() % tp)


def _save(root, tp):
    """World 4: tp ranks by 4 / tp data-parallel replicas."""
    group, rank = _tp_group(tp), dist.get_rank()
    tensors = sharded(cut(global_values(), group), group, True)
    rng = torch.full((5,), rank, dtype=torch.uint8)
    save(root, 1, tensors, {}, rank_local=RankLocal(rank, {"tp": tp}, {"rng": rng}))


def _load(root, tp):
    group, rank = _tp_group(tp), dist.get_rank()
    local = cut({k: v + 1 for k, v in global_values().items()}, group)
    result = load(root, sharded(local, group, False), rank_local=RankLocal(rank, {"tp": tp}))
    wanted = cut(global_values(), group)
    wanted["embedding"] = torch.where(wanted["embedding"] == -777.0, 0.0, wanted["embedding"])
    equal = all(torch.equal(local[name], wanted[name]) for name in wanted)
    return equal, result.rank_local and result.rank_local["rng"].tolist()


def test_replicas_share_the_work_and_any_layout_loads(tmp_path):
    for saved in (1, 2, 4):
        root = tmp_path / str(saved)
        run_distributed(_save, 4, root, saved)
        whole = read_tensors(root)
        for name, value in global_values().items():
            assert torch.equal(whole[f"model.{name}"], value)
        files = json.loads((root / "iter_0000001" / "metadata.json").read_text())["files"]
        stored = sum(record["bytes"] for record in files.values())
        needed = sum(v.numel() * 8 for v in global_values().values())
        assert len(files) == 4
        assert stored < needed + 4 * 2500  # nothing twice; the rest is headers
        for loaded in (1, 2, 4):
            answers = run_distributed(_load, 4, root, loaded)
            assert all(equal for equal, _ in answers)
            own = [[rank] * 5 if loaded == saved else None for rank in range(4)]
            assert [rng for _, rng in answers] == own


def _outcome(action):
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return None


def _load_one_part_each(root):
    rank = dist.get_rank()
    local = torch.zeros(4)
    text = _outcome(lambda: load(root, {f"model.{rank}": local}))
    return text, bool(local.any())


def test_damage_that_one_rank_sees_changes_nothing_anywhere(tmp_path):
    save(tmp_path, 1, {f"model.{rank}": torch.ones(4) for rank in range(2)}, {})
    assert run_distributed(_load_one_part_each, 2, tmp_path) == [(None, True)] * 2
    path = next((tmp_path / "iter_0000001").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    answers = run_distributed(_load_one_part_each, 2, tmp_path)
    assert all(str(path) in text and "model.1@0" in text for text, _ in answers)
    assert [changed for _, changed in answers] == [False, False]


def _fail_on_rank_one(root, step):
    def fail(*_):
        raise OSError(28, "No space left on device")

    rank = dist.get_rank()
    tensors = {f"model.{rank}": torch.ones(4)}
    original = storage.write_shard
    common = {}
    if rank == 1 and step == "write":
        storage.write_shard = fail
    if rank == 1 and step == "common":
        tensors = {"model.1": torch.ones(4, dtype=torch.complex64)}
    if rank == 0 and step == "publish":
        saver.publish, publish = fail, saver.publish
    try:
        return _outcome(lambda: save(root, 2, tensors, common))
    finally:
        storage.write_shard = original
        if rank == 0 and step == "publish":
            saver.publish = publish


@pytest.mark.parametrize("step", ["common", "write", "publish"])
def test_a_save_that_fails_on_one_rank_fails_on_all(tmp_path, step):
    save(tmp_path, 1, {"model.0": torch.ones(4)}, {})
    answers = run_distributed(_fail_on_rank_one, 2, tmp_path, step, timeout=60)
    wanted = "complex64" if step == "common" else "No space left"
    assert all(wanted in text for text in answers)
    assert latest_iteration(tmp_path) == 1
    assert list(Path(tmp_path).glob("iter_0000002/*")) == []


def _subgroup_save(root):
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        save(root, 4, {"model.a": torch.arange(3.0)}, {}, group=group)
        target = torch.zeros(3)
        load(root, {"model.a": target}, group=group)
        return target.tolist()
    return None


def test_a_part_of_the_ranks_may_save(tmp_path):
    answers = run_distributed(_subgroup_save, 4, tmp_path)
    assert answers == [None, [0, 1, 2], [0, 1, 2], None]


def _missing_on_one_stage(root):
    rank = dist.get_rank()
    return _outcome(
        lambda: load(root, {"model.a": torch.zeros(3), f"model.x{rank}": torch.ones(1)})
    )


def test_missing_keys_of_all_ranks_are_listed_everywhere(tmp_path):
    save(tmp_path, 1, {"model.a": torch.ones(3)}, {})
    answers = run_distributed(_missing_on_one_stage, 2, tmp_path)
    assert all("missing in the checkpoint (2): model.x0, model.x1" in text for text in answers)
