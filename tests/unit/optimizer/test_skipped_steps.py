"""A step that is left out changes nothing on any rank: parameters, state, counters.

Every rule, with every ZeRO stage, where one rank alone overflows.
"""

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

RULES = ["adam", "sgd", "lion", "muon"]


class Net(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 6)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def snapshot(chunk, optimizer):
    """Everything that an update changes, as copies."""
    chunk.finish_param_sync()
    found = {f"param {part.name}": part.data.detach().clone() for part in chunk.held_parts()}
    for part, tensors in optimizer.state_parts():
        found |= {f"{kind} {part.name}": t.clone() for kind, t in tensors.items()}
    return found


def is_same(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(first[key], second[key]) for key in first)


def attempt(chunk, optimizer, seed, overflow=False):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).bfloat16()
    chunk.zero_grad_buffer()
    loss = optimizer.scale_loss(chunk(x).float().sum())
    (loss * torch.inf if overflow else loss).backward()
    finalize_model_grads([chunk])
    return bool(optimizer.step().update_successful)


def skip_and_go_on(stage, rule, low):
    context = parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    net = Net().bfloat16()
    ddp_config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=STRATEGIES[stage],
        main_grads_dtype="bf16" if low else "fp32",
    )
    wrapper = FullyShardedDataParallel if stage == 3 else DistributedDataParallel
    chunk = wrapper(None, ddp_config, net)
    config = OptimizerConfig(
        optimizer=rule, lr=0.05, fp16=True, initial_loss_scale=1024.0, hysteresis=1
    )
    optimizer = get_megatron_optimizer(config, [chunk])
    assert attempt(chunk, optimizer, 1)
    before, scaler = snapshot(chunk, optimizer), optimizer.grad_scaler.state_dict()
    assert not attempt(chunk, optimizer, 2, overflow=context.dp.rank == 1)
    skipped, count = is_same(before, snapshot(chunk, optimizer)), optimizer.step_count
    halved = optimizer.grad_scaler.state_dict()["scale"] / scaler["scale"]
    assert attempt(chunk, optimizer, 3)
    moved = not is_same(before, snapshot(chunk, optimizer))
    return skipped, count, halved, moved, optimizer.step_count


def all_rules(stage):
    results = []
    for rule in RULES:
        for low in (False, True):
            results.append(skip_and_go_on(stage, rule, low))
            parallel_state.destroy_model_parallel()
    return results


@pytest.mark.dist
@pytest.mark.parametrize("stage", range(4))
def test_one_rank_overflows(stage):
    for results in run_distributed(all_rules, 2, stage):
        assert results == [(True, 1, 0.5, True, 2)] * (2 * len(RULES))


@pytest.mark.parametrize("rule", RULES)
def test_a_vetoed_step_is_not_counted(rule):
    torch.manual_seed(0)
    net = Net()
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer=rule, lr=0.05), [net])
    for vetoed in (False, True, True):
        net.zero_grad()
        net(torch.ones(2, 6)).sum().backward()
        optimizer.step((lambda norm: norm >= 0) if vetoed else None)
    assert optimizer.step_count == 1
    optimizer.step_count = 7
    assert optimizer.step_count == 7
