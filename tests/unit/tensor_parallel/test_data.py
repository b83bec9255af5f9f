"""Batches from the first tensor-parallel rank to the others."""

import pytest
import torch

from mcore.errors import DataError
from mcore.tensor_parallel import broadcast_data
from tests.unit.tensor_parallel.helpers import run_at

pytestmark = pytest.mark.dist


def _batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(1000, (2, 8), generator=generator),
        "labels": torch.randint(1000, (2, 8), generator=generator).t().contiguous().t(),
        "length": torch.randint(1000, (), generator=generator),
        "unused": torch.zeros(3),
    }


def _send(group, other):
    mine = _batch(0)
    if not group.is_first:
        mine = {"nothing": None, "own": _batch(1)}[other]
    return broadcast_data(["labels", "tokens", "length"], mine, torch.int64)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("other", ["nothing", "own"])
def test_every_rank_gets_the_first_ranks_tensors(tp, other):
    expected = _batch(0)
    for result in run_at(tp, _send, other):
        assert list(result) == ["labels", "tokens", "length"]
        assert all(torch.equal(result[key], expected[key]) for key in result)


def _fail(group, keys, dtype):
    try:
        broadcast_data(keys, _batch(0) if group.is_first else None, dtype)
    except DataError as error:
        return str(error)
    return None


@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_learns_what_is_wrong(tp):
    for message in run_at(tp, _fail, ["tokens", "mask"], torch.int64):
        assert message == "batch has no 'mask'; it has labels, length, tokens, unused"
    for message in run_at(tp, _fail, ["tokens"], torch.float32):
        assert message == "'tokens' has dtype torch.int64, expected torch.float32"


def test_no_keys_is_an_empty_batch():
    assert broadcast_data([], None, torch.int64) == {}
