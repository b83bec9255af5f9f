"""Chunks without parameters (a pipeline stage without layers), and with frozen ones only."""

import pytest
import torch
from torch import nn

from mcore import parallel_state
from mcore.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
    finalize_model_grads,
)
from mcore.optimizer import OptimizerConfig, get_megatron_optimizer
from mcore.testing import run_distributed


def step_of(kind):
    parallel_state.initialize_model_parallel()
    module = nn.Identity() if kind == "empty" else nn.Linear(3, 3).requires_grad_(False)
    options = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    chunk = FullyShardedDataParallel(None, options, module)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [chunk])
    chunk.zero_grad_buffer()
    x = torch.ones(2, 3, requires_grad=True)
    chunk(x).sum().backward()
    finalize_model_grads([chunk])
    result = optimizer.step()
    return x.grad is not None, bool(result.update_successful), float(result.grad_norm)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["empty", "frozen"])
def test_a_chunk_without_anything_to_train_makes_its_steps(kind):
    assert run_distributed(step_of, 2, kind) == [(True, True, 0.0)] * 2
