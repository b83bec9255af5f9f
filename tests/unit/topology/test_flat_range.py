import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.topology.flat_range import FlatRange
from mcore.topology.param_sharding import ParamSharding, Piece

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.data())
def test_boxes_are_the_run_in_memory_order(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    numel = data.draw(st.integers(0, size - start))
    whole = torch.arange(size).view(shape)
    got = []
    boxes = FlatRange(shape, start, numel).boxes()
    for offsets, sizes in boxes:
        got += whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].flatten()
    assert [int(x) for x in got] == list(range(start, start + numel))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_views_find_each_global_element_once(data):
    # Two runs of rows (gate and up) and two rows of padding; the second run belongs to another.
    dim = data.draw(st.integers(0, 1))
    shape = (8, 3) if dim == 0 else (3, 8)
    pieces = (Piece(0, 10, 3), Piece(3, 20, 3, is_owner=False))
    sharding = ParamSharding((26, 3) if dim == 0 else (3, 26), dim, pieces)
    cut = data.draw(st.integers(0, 24))
    local = torch.arange(24.0).view(shape)
    found, padding = {}, []
    for start, end in ((0, cut), (cut, 24)):
        part = FlatRange(shape, start, end - start)
        flat = local.flatten()[start:end]
        for offsets, view in part.views(flat, sharding, owned_only=False):
            for index in torch.cartesian_prod(*(torch.arange(n) for n in view.shape)).tolist():
                place = tuple(o + i for o, i in zip(offsets, index, strict=True))
                assert place not in found
                found[place] = view[tuple(index)].item()
        padding += [x.item() for view in part.padding(flat, sharding) for x in view.flatten()]
    expected = {}
    for piece in pieces:
        for row in range(piece.length):
            for other in range(3):
                mine, place = [other, other], [other, other]
                mine[dim], place[dim] = piece.local_start + row, piece.global_start + row
                expected[tuple(place)] = local[tuple(mine)].item()
    assert found == expected
    assert sorted(padding) == sorted(local.narrow(dim, 6, 2).flatten().tolist())
    owned = [v for _, v in FlatRange(shape, 0, 24).views(local, sharding, owned_only=True)]
    assert sum(v.numel() for v in owned) == 9
