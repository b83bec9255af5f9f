"""Shared by the tests of this folder: run at a tensor-parallel size, draw reproducible tensors."""

import torch

from mcore import parallel_state
from mcore.testing import run_distributed


def run_at(tp, fn, *args):
    """Results of `fn(group, *args)` on each of tp ranks; alone, torch.distributed is not used."""
    if tp == 1:
        assert not torch.distributed.is_initialized()
        return [fn(parallel_state.tensor_model_parallel_group_or(None), *args)]
    return run_distributed(_with_group, tp, tp, fn, args)


def _with_group(tp, fn, args):
    return fn(parallel_state.initialize_model_parallel(tp).tp, *args)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def own(x, dim, group):
    """This rank's part of x along a dimension."""
    return x.chunk(group.size, dim)[group.rank].clone()


def backward_unchanged(output, grad):
    """Backward from `output`; the gradient handed in must come out bit for bit as it went in."""
    before = grad.clone()
    output.backward(grad)
    assert torch.equal(grad, before)
