"""Region operators: values, transposes, gradients by finite differences, inputs left alone.

A tensor lives in one of two spaces. "same" is equal on all ranks and counts once in an inner
product; "parts" differs by rank and counts on each. An operator is right if <A x, y> = <x, A* y>.
"""

import pytest
import torch
from torch.autograd import gradcheck

from mcore.errors import ShapeError
from mcore.tensor_parallel import mappings
from mcore.topology.group import Group
from tests.unit.tensor_parallel.helpers import draw, run_at

pytestmark = pytest.mark.dist

OPERATORS = {
    # name: (operator, Function, space of x, space of y)
    "copy_to": (
        mappings.copy_to_tensor_model_parallel_region,
        mappings._CopyToModelParallelRegion,
        "same",
        "parts",
    ),
    "reduce_from": (
        mappings.reduce_from_tensor_model_parallel_region,
        mappings._ReduceFromModelParallelRegion,
        "parts",
        "same",
    ),
    "scatter_to": (
        mappings.scatter_to_tensor_model_parallel_region,
        mappings._ScatterToModelParallelRegion,
        "same",
        "parts",
    ),
    "gather_from": (
        mappings.gather_from_tensor_model_parallel_region,
        mappings._GatherFromModelParallelRegion,
        "parts",
        "same",
    ),
    "scatter_to_sequence": (
        mappings.scatter_to_sequence_parallel_region,
        mappings._ScatterToSequenceParallelRegion,
        "same",
        "parts",
    ),
    "gather_from_sequence": (
        mappings.gather_from_sequence_parallel_region,
        mappings._GatherFromSequenceParallelRegion,
        "parts",
        "parts",
    ),
    "gather_from_sequence_replicated": (
        lambda x: mappings.gather_from_sequence_parallel_region(x, False),
        mappings._GatherFromSequenceParallelRegion,
        "parts",
        "same",
    ),
    "reduce_scatter_to_sequence": (
        mappings.reduce_scatter_to_sequence_parallel_region,
        mappings._ReduceScatterToSequenceParallelRegion,
        "parts",
        "parts",
    ),
}
SHAPE = (8, 3, 4)


def _expected(name, inputs, rank):
    """What rank `rank` gets, from the inputs of all ranks, in plain arithmetic."""
    size = len(inputs)
    if name == "copy_to":
        return inputs[rank]
    if name == "reduce_from":
        return sum(inputs)
    if name == "gather_from":
        return torch.cat(inputs, -1)
    if name.startswith("gather_from_sequence"):
        return torch.cat(inputs, 0)
    if name == "scatter_to":
        return inputs[rank].chunk(size, -1)[rank]
    if name == "scatter_to_sequence":
        return inputs[rank].chunk(size, 0)[rank]
    return sum(inputs).chunk(size, 0)[rank]


def _seed(space, rank):
    return 100 + rank if space == "parts" else 100


def _transpose(group, name):
    operator, _, x_space, y_space = OPERATORS[name]
    x = draw(*SHAPE, seed=_seed(x_space, group.rank)).requires_grad_()
    out = operator(x)
    y = draw(*out.shape, seed=1000 + _seed(y_space, group.rank))
    x_before, y_before = x.detach().clone(), y.clone()
    (back,) = torch.autograd.grad(out, x, y)
    assert torch.equal(x.detach(), x_before)
    assert torch.equal(y, y_before)
    return out.detach(), float((out.detach() * y).sum()), float((x.detach() * back).sum())


def _inner(space, products):
    if space == "parts":
        return sum(products)
    assert len(set(products)) == 1
    return products[0]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", OPERATORS)
def test_value_and_transpose(tp, name):
    _, _, x_space, y_space = OPERATORS[name]
    results = run_at(tp, _transpose, name)
    inputs = [draw(*SHAPE, seed=_seed(x_space, rank)) for rank in range(tp)]
    for rank, (out, _, _) in enumerate(results):
        torch.testing.assert_close(out, _expected(name, inputs, rank), rtol=0, atol=1e-12)
    left = _inner(y_space, [product for _, product, _ in results])
    right = _inner(x_space, [product for _, _, product in results])
    assert left == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("name", OPERATORS)
def test_finite_differences_alone(name):
    function = OPERATORS[name][1]
    x = draw(2, 3, 4).requires_grad_()
    assert gradcheck(lambda x: function.apply(x, Group.single("tp")), (x,))


def _mixed(x, rank):
    """Something that is not linear, and that differs by rank."""
    return torch.sin(x * (rank + 1.5))


#: Functions from a tensor equal on all ranks to another, so that all ranks difference in step.
CHAINS = {
    "copy_to, reduce_from": lambda x, r: mappings.reduce_from_tensor_model_parallel_region(
        _mixed(mappings.copy_to_tensor_model_parallel_region(x), r)
    ),
    "scatter_to, gather_from": lambda x, r: mappings.gather_from_tensor_model_parallel_region(
        _mixed(mappings.scatter_to_tensor_model_parallel_region(x), r)
    ),
    "sequence: scatter, gather": lambda x, r: mappings.gather_from_sequence_parallel_region(
        _mixed(mappings.scatter_to_sequence_parallel_region(x), r), False
    ),
    "sequence: scatter, gather, reduce-scatter, gather": lambda x, r: (
        mappings.gather_from_sequence_parallel_region(
            mappings.reduce_scatter_to_sequence_parallel_region(
                _mixed(
                    mappings.gather_from_sequence_parallel_region(
                        mappings.scatter_to_sequence_parallel_region(x)
                    ),
                    r,
                )
            ),
            tensor_parallel_output_grad=False,
        )
    ),
}


def _finite_differences(group, name):
    x = draw(4, 1, 4).requires_grad_()
    assert gradcheck(lambda x: CHAINS[name](x, group.rank), (x,))


@pytest.mark.parametrize("name", CHAINS)
def test_finite_differences_together(name):
    run_at(2, _finite_differences, name)


def _indivisible(group, dim):
    del group
    operator = (
        mappings.scatter_to_sequence_parallel_region
        if dim == 0
        else mappings.scatter_to_tensor_model_parallel_region
    )
    operator(torch.ones(3, 3))


@pytest.mark.parametrize("dim", [0, -1])
def test_indivisible_dimension_names_shape_and_ranks(dim):
    with pytest.raises(ShapeError, match=rf"dimension {dim} of \[3, 3\].*\(2, ranks \[0, 1\]\)"):
        run_at(2, _indivisible, dim)


def _twice(group):
    x = draw(2, 2).requires_grad_()
    y = mappings.copy_to_tensor_model_parallel_region(x, group).pow(2).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    grad.sum().backward()


def test_second_derivatives_are_refused_rather_than_wrong():
    with pytest.raises(RuntimeError, match="once_differentiable"):
        run_at(2, _twice)
