"""ShardedTensor and its construction from a parameter's sharding."""

import pytest
import torch

from mcore.checkpoint import Rectangle, ShardedTensor, sharded_parameter, sharded_tensor
from mcore.errors import ShapeError
from mcore.topology.param_sharding import ParamSharding, Piece

from .layouts import cut, global_values, group_of, shardings


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_owned_rectangles_cover_every_parameter_exactly_once(tp):
    values = global_values()
    count = {name: torch.zeros_like(value) for name, value in values.items()}
    for rank in range(tp):
        group = group_of(tp, rank)
        local = cut(values, group)
        for name, sharding in shardings(group).items():
            for box in sharded_parameter(name, local[name], sharding, for_save=True).rectangles:
                where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                assert torch.equal(box.data, values[name][where])
                count[name][where] += 1
    assert all(bool((n == 1).all()) for n in count.values())


def test_replicas_are_filled_but_not_saved():
    group = group_of(4, 1)
    local = cut(global_values(), group)["qkv"]
    sharding = shardings(group)["qkv"]
    saved = sharded_parameter("qkv", local, sharding, for_save=True)
    loaded = sharded_parameter("qkv", local, sharding, for_save=False)
    assert [box.offsets[0] for box in saved.rectangles] == [3]
    assert [box.offsets[0] for box in loaded.rectangles] == [3, 6]


def test_a_tied_copy_is_loaded_and_never_saved():
    sharding = ParamSharding((6, 2), 0, (Piece(0, 0, 6),), tied_key="embedding.weight")
    tensor = torch.zeros(8, 2)
    assert sharded_parameter("model.e", tensor, sharding, for_save=True).rectangles == ()
    loaded = sharded_parameter("model.e", tensor, sharding, for_save=False)
    assert [tuple(box.sizes) for box in loaded.rectangles] == [(6, 2)]
    assert [tuple(view.shape) for view in loaded.padding] == [(2, 2)]


def test_large_rectangles_are_cut_into_runs_of_rows(monkeypatch):
    monkeypatch.setattr(sharded_tensor, "CHUNK_BYTES", 3 * 5 * 4)
    data = torch.arange(35.0).reshape(7, 5)
    tensor = ShardedTensor("k", (10, 5), torch.float32, [Rectangle((2, 0), data)])
    assert [box.offsets for box in tensor.rectangles] == [(2, 0), (5, 0), (8, 0)]
    assert torch.equal(torch.cat([box.data for box in tensor.rectangles]), data)


def test_what_lies_outside_or_has_another_type_is_refused():
    with pytest.raises(ShapeError, match="does not lie inside"):
        ShardedTensor("k", (4,), torch.float32, [Rectangle((2,), torch.zeros(3))])
    with pytest.raises(ShapeError, match="does not lie inside"):
        ShardedTensor("k", (4, 1), torch.float32, [Rectangle((0,), torch.zeros(3))])
    with pytest.raises(ShapeError, match="float64"):
        ShardedTensor("k", (4,), torch.float32, [Rectangle((0,), torch.zeros(3).double())])
    a = ShardedTensor("k", (4,), torch.float32, [])
    with pytest.raises(ShapeError, match="not parts of one tensor"):
        a.joined(ShardedTensor("k", (5,), torch.float32, []))
