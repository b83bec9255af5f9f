"""Column- and row-parallel linear layers against torch's own linear map in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from mcore.config.parallel import ModelParallelConfig
from mcore.errors import ConfigError, ShapeError
from mcore.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.unit.tensor_parallel.helpers import backward_unchanged, draw, own, run_at

pytestmark = pytest.mark.dist

S, B, K, N = 8, 2, 12, 20
CLOSE = {"rtol": 0, "atol": 1e-12}


def _config(**options):
    return ModelParallelConfig(params_dtype=torch.float64, **options)


def _plain(with_bias):
    """Input, weight, bias and their gradients for output gradient dy, from one process."""
    torch.manual_seed(7)
    weight = torch.nn.init.xavier_normal_(torch.empty(N, K, dtype=torch.float64))
    weight.requires_grad_()
    x = draw(S, B, K, seed=1).requires_grad_()
    bias = draw(N, seed=2).requires_grad_() if with_bias else None
    y = F.linear(x, weight, bias)
    dy = draw(S, B, N, seed=3)
    y.backward(dy)
    return x, weight, bias, y.detach(), dy


def _load_bias(layer, bias, group, cut):
    if bias is not None:
        assert not layer.bias.any()
        layer.bias.data = own(bias.detach(), 0, group) if cut else bias.detach().clone()


def _column(group, sp, gather, skip, with_bias):
    x, weight, bias, y, dy = _plain(with_bias)
    torch.manual_seed(7)
    layer = ColumnParallelLinear(
        K,
        N,
        config=_config(sequence_parallel=sp),
        bias=with_bias,
        gather_output=gather,
        skip_bias_add=skip,
    )
    _load_bias(layer, bias, group, cut=True)
    assert torch.equal(layer.weight, own(weight, 0, group))

    mine = (own(x.detach(), 0, group) if sp else x.detach().clone()).requires_grad_()
    before = mine.detach().clone()
    out, rest = layer(mine)
    assert rest is (layer.bias if skip else None)
    if skip and with_bias:
        # The bias is still this rank's part, also where the output is whole.
        out = out + (rest if not gather else bias.detach())
    torch.testing.assert_close(out.detach(), y if gather else own(y, -1, group), **CLOSE)
    backward_unchanged(out, dy.clone() if gather else own(dy, -1, group))
    assert torch.equal(mine.detach(), before)
    torch.testing.assert_close(mine.grad, own(x.grad, 0, group) if sp else x.grad, **CLOSE)
    torch.testing.assert_close(layer.weight.grad, own(weight.grad, 0, group), **CLOSE)
    if with_bias and not (skip and gather):
        torch.testing.assert_close(layer.bias.grad, own(bias.grad, 0, group), **CLOSE)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("sp", "gather", "skip", "with_bias"),
    [
        case
        for case in itertools.product([False, True], repeat=4)
        if not (case[0] and case[1])  # gather_output is not defined with sequence parallelism
    ],
)
def test_column_parallel(tp, sp, gather, skip, with_bias):
    run_at(tp, _column, sp, gather, skip, with_bias)


def _row(group, sp, parallel_input, skip, with_bias):
    x, weight, bias, y, dy = _plain(with_bias)
    torch.manual_seed(7)
    layer = RowParallelLinear(
        K,
        N,
        config=_config(sequence_parallel=sp),
        bias=with_bias,
        input_is_parallel=parallel_input,
        skip_bias_add=skip,
    )
    _load_bias(layer, bias, group, cut=False)
    assert torch.equal(layer.weight, own(weight, 1, group))

    mine = own(x.detach(), -1, group) if parallel_input else x.detach().clone()
    before = mine.clone()
    mine.requires_grad_()
    out, rest = layer(mine)
    assert rest is (layer.bias if skip else None)
    if rest is not None:
        out = out + rest
    torch.testing.assert_close(out.detach(), own(y, 0, group) if sp else y, **CLOSE)
    backward_unchanged(out, own(dy, 0, group) if sp else dy.clone())
    assert torch.equal(mine.detach(), before)
    expected = own(x.grad, -1, group) if parallel_input else x.grad
    torch.testing.assert_close(mine.grad, expected, **CLOSE)
    torch.testing.assert_close(layer.weight.grad, own(weight.grad, 1, group), **CLOSE)
    return None if bias is None else (layer.bias.grad, bias.grad, layer.bias.sequence_parallel)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("sp", "parallel_input", "skip", "with_bias"),
    [
        case
        for case in itertools.product([False, True], repeat=4)
        if case[1] or not case[0]  # sequence parallelism needs a parallel input
    ],
)
def test_row_parallel(tp, sp, parallel_input, skip, with_bias):
    results = run_at(tp, _row, sp, parallel_input, skip, with_bias)
    if with_bias:
        grads = [grad for grad, _, _ in results]
        whole = results[0][1]
        assert all(partial == (sp and tp > 1) for _, _, partial in results)
        if sp:  # each rank added the bias to its part of the sequence only
            torch.testing.assert_close(sum(grads), whole, **CLOSE)
        else:
            for grad in grads:
                torch.testing.assert_close(grad, whole, **CLOSE)


def _initial(group):
    del group
    torch.manual_seed(11)
    column = ColumnParallelLinear(K, N, init_method=torch.nn.init.kaiming_uniform_)
    row = RowParallelLinear(K, N, init_method=torch.nn.init.orthogonal_, input_is_parallel=True)
    return column.weight.detach(), row.weight.detach(), torch.get_rng_state()


def test_initial_weights_and_random_state_do_not_depend_on_the_cut():
    alone = run_at(1, _initial)[0]
    torch.manual_seed(11)
    assert torch.equal(torch.nn.init.kaiming_uniform_(torch.empty(N, K)), alone[0])
    for tp in (2, 4):
        results = run_at(tp, _initial)
        assert torch.equal(torch.cat([r[0] for r in results], 0), alone[0])
        assert torch.equal(torch.cat([r[1] for r in results], 1), alone[1])
        assert all(torch.equal(r[2], alone[2]) for r in results)


def _given_weight(group):
    x, weight, _, y, dy = _plain(with_bias=False)
    layer = ColumnParallelLinear(
        K, N, config=_config(), bias=False, skip_weight_param_allocation=True
    )
    assert list(layer.parameters()) == []
    with pytest.raises(ShapeError, match="pass one to forward"):
        layer(x.detach())
    mine = own(weight.detach(), 0, group).requires_grad_()
    out, _ = layer(x.detach(), weight=mine)
    torch.testing.assert_close(out.detach(), own(y, -1, group), **CLOSE)
    out.backward(own(dy, -1, group))
    torch.testing.assert_close(mine.grad, own(weight.grad, 0, group), **CLOSE)


@pytest.mark.parametrize("tp", [1, 2])
def test_weight_handed_to_forward(tp):
    run_at(tp, _given_weight)


def _frozen(group, sp):
    x, weight, _, _, dy = _plain(with_bias=False)
    torch.manual_seed(7)
    layer = ColumnParallelLinear(K, N, config=_config(sequence_parallel=sp), bias=False)
    mine = (own(x.detach(), 0, group) if sp else x.detach().clone()).requires_grad_()
    layer.weight.requires_grad_(False)
    layer(mine)[0].backward(own(dy, -1, group))
    assert layer.weight.grad is None
    torch.testing.assert_close(mine.grad, own(x.grad, 0, group) if sp else x.grad, **CLOSE)
    layer.weight.requires_grad_()
    layer(mine.detach())[0].backward(own(dy, -1, group))
    torch.testing.assert_close(layer.weight.grad, own(weight.grad, 0, group), **CLOSE)


@pytest.mark.parametrize("sp", [False, True])
def test_frozen_weight_and_input_without_gradient(sp):
    run_at(2, _frozen, sp)


def _autocast(group):
    """Mixed precision by torch.autocast, against nn.Linear under the same autocast."""
    torch.manual_seed(7)
    weight = torch.nn.init.xavier_normal_(torch.empty(N, K)).requires_grad_()
    x = draw(S, B, K, dtype=torch.float32).requires_grad_()
    dy = draw(S, B, N, seed=3).bfloat16()
    torch.manual_seed(7)
    layer = ColumnParallelLinear(K, N, bias=False)
    mine = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, (out, _) = F.linear(x, weight), layer(mine)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, own(expected, -1, group))
    expected.backward(dy)
    out.backward(own(dy, -1, group))
    assert layer.weight.grad.dtype == mine.grad.dtype == torch.float32
    torch.testing.assert_close(layer.weight.grad, own(weight.grad, 0, group), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(mine.grad, x.grad, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("tp", [1, 2])
def test_autocast(tp):
    run_at(tp, _autocast)


def _refusals(group):
    del group
    with pytest.raises(ShapeError, match=r"size 7 must be divisible by 2"):
        ColumnParallelLinear(4, 7)
    with pytest.raises(ShapeError, match=r"size 7 must be divisible by 2"):
        RowParallelLinear(7, 4)
    with pytest.raises(ConfigError, match="gather_output"):
        ColumnParallelLinear(4, 4, config=_config(sequence_parallel=True), gather_output=True)
    with pytest.raises(ConfigError, match="input_is_parallel=True"):
        RowParallelLinear(4, 4, config=_config(sequence_parallel=True))


def test_refusals():
    run_at(2, _refusals)


def test_arguments_that_are_not_built_are_type_errors():
    with pytest.raises(TypeError, match="stride"):
        ColumnParallelLinear(4, 4, stride=2)
    with pytest.raises(TypeError, match="is_expert"):
        RowParallelLinear(4, 4, is_expert=True)
