"""Declarations of how parameters are cut, and names that do not depend on the layout."""

import pytest
import torch
from torch import nn

from mcore.errors import ShapeError
from mcore.topology.group import Group
from mcore.topology.param_sharding import (
    ParamSharding,
    Piece,
    even_rows,
    global_name,
    global_named_parameters,
    replicated_sharding,
    set_sharding,
    sharding_of,
)


class _Member(Group):
    """A member of a group that never communicates; cutting rows needs no communicator."""

    def __post_init__(self):
        pass


def _members(size):
    return [_Member("tp", tuple(range(size)), rank, None) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("total", "blocks", "used"), [(16, 1, None), (16, 2, None), (12, 1, 9)])
def test_even_rows_deal_every_row_once(size, total, blocks, used):
    whole = torch.arange(float(total))
    seen = []
    for member in _members(size):
        cut = even_rows(total, member, blocks=blocks, used=used)
        assert (cut.total, cut.local) == (used or total, total // size)
        expected = torch.cat([part.chunk(size)[member.rank] for part in whole.chunk(blocks)])
        sharding = cut.sharding()
        assert sharding.global_shape == (used or total,)
        for piece, view in sharding.views(expected):
            first = piece.global_start
            assert torch.equal(view, whole[first : first + piece.length])
            seen += view.tolist()
    assert sorted(seen) == list(range(used or total))


def test_indivisible_rows_name_the_sizes():
    with pytest.raises(ShapeError, match=r"size 10 must be divisible by 2 x 4"):
        even_rows(10, _members(4)[0], blocks=2)


def test_sharding_along_the_second_dimension():
    sharding = even_rows(8, _members(4)[2]).sharding(5, dim=1)
    assert sharding.global_shape == (5, 8)
    assert sharding.tp_dim == sharding.dim == 1
    (piece,) = sharding.pieces
    assert sharding.global_offsets(piece) == (0, 4)
    x = torch.arange(10.0).view(5, 2)
    assert [view.shape for view in sharding.owned(x)] == [(5, 2)]


def test_replicas_have_one_owner_and_a_tied_copy_has_none():
    owners = [replicated_sharding((3, 2), m).owned(torch.ones(3, 2)) for m in _members(4)]
    assert [len(views) for views in owners] == [1, 0, 0, 0]
    scalar = replicated_sharding((), _members(1)[0])
    assert scalar.owned(torch.tensor(2.0)) == [torch.tensor(2.0)]
    assert scalar.global_offsets(scalar.pieces[0]) == ()
    tied = ParamSharding((2,), 0, (Piece(0, 0, 2),), tied_key="embedding.weight")
    assert tied.owned(torch.ones(2)) == []


def test_undeclared_parameters_are_replicated():
    first, second = _members(2)
    param = nn.Parameter(torch.zeros(4, 3))
    assert sharding_of(param, first) == replicated_sharding((4, 3), first)
    assert sharding_of(param, second).owned(param) == []
    param.sequence_parallel = True
    assert sharding_of(param, first).sequence_parallel
    declared = even_rows(8, second).sharding(3)
    set_sharding(param, declared)
    assert sharding_of(param, second) is declared
    assert (param.tensor_model_parallel, param.partition_dim, param.partition_stride) == (
        True,
        0,
        1,
    )
    assert not param.sequence_parallel


class _Block(nn.Module):
    def __init__(self, first, count):
        super().__init__()
        self.layer_offset = first
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
        self.final_norm = nn.LayerNorm(2)


class _Model(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.decoder = _Block(first, 2)
        self.output = nn.Linear(2, 2, bias=False)
        sharding = ParamSharding((2, 2), 0, (Piece(0, 0, 2),), tied_key="embedding.weight")
        set_sharding(self.output.weight, sharding)


class _Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("wrap", [lambda m: m, _Wrapper, lambda m: _Wrapper(_Wrapper(m))])
def test_names_carry_global_layer_numbers_and_no_wrappers(wrap):
    model = wrap(_Model(first=10))
    named = list(global_named_parameters(model))
    assert [name for name, _ in named] == [
        "decoder.layers.10.weight",
        "decoder.layers.10.bias",
        "decoder.layers.11.weight",
        "decoder.layers.11.bias",
        "decoder.final_norm.weight",
        "decoder.final_norm.bias",
        "embedding.weight",
    ]
    assert [id(param) for _, param in named] == [id(param) for param in model.parameters()]
    prefix = "module." * sum(isinstance(m, _Wrapper) for m in model.modules())
    assert global_name(model, f"{prefix}decoder.layers.1") == "decoder.layers.11"


def test_layers_without_an_offset_keep_their_numbers():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2, bias=False)])
    assert [name for name, _ in global_named_parameters(model)] == ["layers.0.weight"]
    model.layer_offset = 3
    assert [name for name, _ in global_named_parameters(model)] == ["layers.3.weight"]
