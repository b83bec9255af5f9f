"""Update rules against torch's own optimizers, or their formula in fp64."""

import pytest
import torch
from torch import nn

from mcore.errors import ConfigError
from mcore.optimizer import OptimizerConfig, get_megatron_optimizer


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 8), nn.LayerNorm(8)).double()


def loss_of(net, seed):
    tokens = torch.randint(7, (5,), generator=torch.Generator().manual_seed(seed))
    return net(tokens).pow(3).sum()


def groups_of(net, decay):
    matrices = [p for p in net.parameters() if p.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


class PlainLion(torch.optim.Optimizer):
    """The published formula, one parameter at a time."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.01})

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    sign = torch.sign(0.9 * m + 0.1 * p.grad)
                    p.mul_(1 - 0.01 * group["weight_decay"]).sub_(0.01 * sign)
                    m.mul_(0.99).add_(p.grad, alpha=0.01)


@pytest.mark.parametrize(
    ("options", "make"),
    [
        (
            {"optimizer": "sgd", "decoupled_weight_decay": False},
            lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
        ),
        ({"optimizer": "lion", "lion_beta1": 0.9, "lion_beta2": 0.99}, PlainLion),
        (
            {"decoupled_weight_decay": False, "adam_beta2": 0.95},
            lambda groups: torch.optim.Adam(groups, lr=0.01, betas=(0.9, 0.95)),
        ),
    ],
)
def test_equals_the_reference(options, make):
    net, theirs = make_net(), make_net()
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_grad=0.0, **options)
    ours, reference = get_megatron_optimizer(config, [net]), make(groups_of(theirs, 0.1))
    for step in range(5):
        ours.zero_grad()
        loss_of(net, step).backward()
        ours.step()
        reference.zero_grad()
        loss_of(theirs, step).backward()
        reference.step()
    for p, q in zip(net.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "lion"])
def test_a_skipped_step_leaves_every_bit(name):
    net = make_net()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, optimizer=name), [net])
    loss_of(net, 0).backward()
    optimizer.step()
    states = [s for _, _, state in optimizer.named_states() for s in state.values()]
    before = [t.detach().clone() for t in [*net.parameters(), *states]]
    net[1].weight.grad[0, 0] = float("inf")
    assert not optimizer.step().update_successful
    assert all(map(torch.equal, before, [*net.parameters(), *states]))


def test_a_learning_rate_of_the_embedding():
    net = nn.ModuleDict({"word_embeddings": nn.Embedding(3, 2), "fc": nn.Linear(2, 2)})
    config = OptimizerConfig(lr=1e-3, decoupled_lr=1e-2, decoupled_min_lr=1e-4)
    decayed, plain, decoupled = get_megatron_optimizer(config, [net]).param_groups
    assert [tuple(p.shape) for p in decoupled["params"]] == [(3, 2)]
    assert (decoupled["max_lr"], decoupled["min_lr"], decoupled["wd_mult"]) == (1e-2, 1e-4, 1.0)
    assert len(decayed["params"]) == len(plain["params"]) == 1
    with pytest.raises(ConfigError, match="decoupled_min_lr"):
        OptimizerConfig(lr=1.0, decoupled_min_lr=0.1)
