"""Moments in bf16: the update of fp32 Adam on widened moments, rounded to nearest afterwards."""

import pytest
import torch
from torch import nn

from mcore.errors import ConfigError
from mcore.optimizer import OptimizerConfig, get_megatron_optimizer, gradients

BETA1, BETA2, LR, EPS = 0.9, 0.95, 0.01, 1e-8


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def backward(net, seed):
    net.zero_grad()
    net(torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))).pow(2).sum().backward()


def optimizer_of(net, **options):
    config = OptimizerConfig(
        lr=LR, weight_decay=0.1, adam_beta2=BETA2, adam_eps=EPS, clip_grad=0.0, **options
    )
    return get_megatron_optimizer(config, [net])


@torch.no_grad()
def plain_update(param, first, second, step, decay, dtypes):
    """One step by the formula, in fp64, with rounded moments."""
    m, v, g, p = (x.double() for x in (first, second, param.grad, param))
    m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
    denominator = (v / (1 - BETA2**step)).sqrt() + EPS
    p = p * (1 - LR * decay) - LR * m / (1 - BETA1**step) / denominator
    param.copy_(p)
    return m.to(dtypes[0]), v.to(dtypes[1])


@pytest.mark.parametrize("pieces", [30, 4])  # parameters together, and parameters in parts
@pytest.mark.parametrize(
    "names", [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")], ids="-".join
)
def test_equals_the_formula(monkeypatch, names, pieces):
    monkeypatch.setattr(gradients, "PIECE_ELEMENTS", pieces)  # several batches
    ours, theirs = make_net(), make_net()
    optimizer = optimizer_of(ours, exp_avg_dtype=names[0], exp_avg_sq_dtype=names[1])
    dtypes = [{"bf16": torch.bfloat16, "fp32": torch.float32}[name] for name in names]
    states = {
        p: tuple(torch.zeros_like(p, dtype=dtype) for dtype in dtypes) for p in theirs.parameters()
    }
    for step in range(1, 6):
        for net in (ours, theirs):
            backward(net, step)
        optimizer.step()
        for p in theirs.parameters():
            decay = 0.1 if p.dim() > 1 else 0.0
            states[p] = plain_update(p, *states[p], step, decay, dtypes)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            # fp32 against fp64 may round a moment the other way: one unit of bf16 in an update.
            torch.testing.assert_close(p, q, rtol=0, atol=2e-4 if step > 1 else 1e-6)
    kept = {n: s for n, _, s in optimizer.named_states()}
    assert [kept["0.weight"][k].dtype for k in ("exp_avg", "exp_avg_sq")] == dtypes
    assert optimizer.step_count == 5


def test_a_skipped_update_changes_no_bit():
    net = make_net()
    optimizer = optimizer_of(net, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    backward(net, 0)
    optimizer.step()
    before = [t.clone() for _, _, s in optimizer.named_states() for t in s.values()]
    before += [p.detach().clone() for p in net.parameters()]
    backward(net, 1)
    net[0].bias.grad[0] = torch.inf
    assert not optimizer.step().update_successful
    after = [t for _, _, s in optimizer.named_states() for t in s.values()]
    after += [p.detach() for p in net.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert optimizer.step_count == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exp_avg_dtype": "fp16"}, "a scale for every tensor"),
        ({"exp_avg_sq_dtype": "fp8"}, "a scale for every tensor"),
        ({"main_params_dtype": "fp16"}, "a scale for every tensor"),
        ({"exp_avg_dtype": "bf16", "optimizer": "lion"}, "needs `optimizer` adam"),
        ({"optimizer_offload_fraction": 1.5}, "from 0 to 1"),
        ({"optimizer_cpu_offload": True, "optimizer": "muon"}, "exclude each other"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ConfigError, match=words):
        OptimizerConfig(lr=0.1, **options)
