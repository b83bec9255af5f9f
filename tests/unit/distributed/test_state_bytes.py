"""What a rank keeps between steps, in bytes per parameter, against the published table."""

import gc

import pytest
import torch
from torch import nn

from mcore import parallel_state
from mcore.config.distributed import STRATEGIES, DistributedDataParallelConfig
from mcore.distributed import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    finalize_model_grads,
)
from mcore.optimizer import OptimizerConfig, get_megatron_optimizer
from mcore.testing import run_distributed
from mcore.training.held_memory import held_memory

#: By stage: bytes that every rank has, and bytes that are shared out.
TABLE = {
    torch.float32: [(16, 0), (8, 8), (4, 12), (0, 16)],
    torch.bfloat16: [(18, 0), (6, 12), (2, 16), (0, 16)],
    torch.float16: [(18, 0), (6, 12), (2, 16), (0, 16)],
}


def storages():
    """Bytes of every tensor memory of this process, by address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and type(thing) in (torch.Tensor, nn.Parameter):
            memory = thing.untyped_storage()
            if memory.nbytes():
                found[memory.data_ptr()] = memory.nbytes()
    return found


def measure(stage, dtype, low=False):
    parallel_state.initialize_model_parallel()
    before = set(storages())
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(24))).to(dtype)
    numel = sum(p.numel() for p in net.parameters())
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=STRATEGIES[stage],
        main_grads_dtype="bf16" if low else "fp32",
    )
    moments = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"} if low else {}
    wrapper = FullyShardedDataParallel if stage == 3 else DistributedDataParallel
    chunk = wrapper(None, config, net)
    is_half = dtype == torch.float16
    options = OptimizerConfig(lr=1e-3, fp16=is_half, initial_loss_scale=1024.0, **moments)
    optimizer = get_megatron_optimizer(options, [chunk])
    for _ in range(2):
        chunk.zero_grad_buffer()
        optimizer.scale_loss(chunk(torch.ones(2, 64, dtype=dtype)).float().sum()).backward()
        finalize_model_grads([chunk])
        optimizer.step()
    held = sum(size for place, size in storages().items() if place not in before)
    told = held_memory([chunk], optimizer, torch.device("cpu")).between_steps
    return held / numel, told / numel


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", list(TABLE), ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_bytes_per_parameter(stage, dtype, world_size):
    results = run_distributed(measure, world_size, stage, dtype)
    mean = sum(held for held, _ in results) / world_size
    told = sum(told for _, told in results) / world_size
    assert told == pytest.approx(mean, rel=0.04)  # `fully_shard` pads 64 rows to 66
    whole, shared = TABLE[dtype][stage]
    assert mean == pytest.approx(whole + shared / world_size, rel=0.03)


#: bf16 with bf16 gradients and moments: ZeRO-3 keeps its shard of gradients in fp32.
LOW_TABLE = [(12, 0), (4, 8), (2, 10), (0, 12)]


@pytest.mark.dist
@pytest.mark.parametrize("stage", range(4))
def test_bytes_with_low_precision_state(stage):
    results = run_distributed(measure, 2, stage, torch.bfloat16, True)
    mean = sum(held for held, _ in results) / 2
    whole, shared = LOW_TABLE[stage]
    assert mean == pytest.approx(whole + shared / 2, rel=0.03)
