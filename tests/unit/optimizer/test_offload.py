"""State in host memory: the same numbers. The move itself is tried from the CPU to the CPU."""

import pytest
import torch
from torch import nn

from mcore.optimizer import OptimizerConfig, get_megatron_optimizer, param_groups


def make_net(dtype):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(dtype)


def backward(net, seed):
    net.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    net(x.to(net[0].weight)).float().pow(2).sum().backward()


def optimizer_of(net, **options):
    return get_megatron_optimizer(OptimizerConfig(lr=0.01, clip_grad=0.5, **options), [net])


def compared_steps(ours, theirs, moved, plain):
    """Make four steps with both, of which the third has a NaN; yield their parameters in pairs."""
    for step in range(4):
        for net in (plain, moved):
            backward(net, step)
            if step == 2:
                net[0].bias.grad[0] = torch.nan
        first, second = ours.step(), theirs.step()
        assert torch.equal(first.update_successful, second.update_successful)
        yield from zip(moved.parameters(), plain.parameters(), strict=True)


@pytest.fixture
def movable(monkeypatch):
    """Let parameters on the CPU count as those of a device."""
    monkeypatch.setattr(param_groups, "is_on_host", lambda _: False)


@pytest.mark.usefixtures("movable")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["adam", "sgd", "lion"])
@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_the_same_numbers(dtype, rule, fraction):
    plain, moved = make_net(dtype), make_net(dtype)
    ours = optimizer_of(
        moved, optimizer=rule, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction
    )
    theirs = optimizer_of(plain, optimizer=rule)
    assert 0 < sum(item.is_offloaded for item in ours.params) <= 6
    assert all(item.is_offloaded for item in ours.params) == (fraction == 1.0)
    for p, q in compared_steps(ours, theirs, moved, plain):
        assert torch.equal(p, q)
    states = zip(ours.named_states(), theirs.named_states(), strict=True)
    for (name, _, mine), (other, _, wanted) in states:
        assert name == other
        assert all(torch.equal(mine[key], wanted[key]) for key in wanted)
        assert set(mine) == set(wanted)
    if rule == "adam":
        assert ours.step_count == theirs.step_count == 3
    for group in ours.param_groups:
        assert group["lr"] == 0.01


@pytest.mark.usefixtures("movable")
def test_host_copies_follow_a_model_that_was_read():
    net = make_net(torch.float32)
    optimizer = optimizer_of(net, optimizer_cpu_offload=True)
    with torch.no_grad():
        net[0].weight.fill_(2.0)
    optimizer.refresh_host_copies()
    assert all(bool((item.main == item.part.data).all()) for item in optimizer.params)


def test_on_the_cpu_nothing_moves():
    net = make_net(torch.float32)
    optimizer = optimizer_of(net, optimizer_cpu_offload=True)
    assert not any(item.is_offloaded for item in optimizer.params)
    assert optimizer.params[0].main.data_ptr() == net[0].weight.data_ptr()
