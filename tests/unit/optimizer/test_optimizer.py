import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mcore import parallel_state
from mcore.config.distributed import DistributedDataParallelConfig
from mcore.distributed import DistributedDataParallel
from mcore.errors import ConfigError
from mcore.optimizer import OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer
from mcore.testing import run_distributed
from mcore.topology.param_sharding import ParamSharding, Piece, set_sharding

BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.95}


def make_net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 8), nn.LayerNorm(8)).to(dtype)


def loss_of(net, seed):
    tokens = torch.randint(7, (5,), generator=torch.Generator().manual_seed(seed))
    return net(tokens).pow(3).sum()


def wrap(module, **options):
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(**options), module)
    ddp.zero_grad_buffer()
    return ddp


def torch_adamw(named, lr, decay):
    matrices = [p for _, p in named if p.dim() > 1]
    vectors = [p for _, p in named if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, foreach=False)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_equals_torch_adamw(wrapped, clip):
    net, theirs = make_net(), make_net()
    config = OptimizerConfig(lr=0.1, weight_decay=0.1, clip_grad=clip, **BETAS)
    chunk = wrap(net) if wrapped else net
    ours = get_megatron_optimizer(config, [chunk])
    reference = torch_adamw(list(theirs.named_parameters()), 0.1, 0.1)
    scheduler = OptimizerParamScheduler(
        ours, 0.0, 0.1, 0.01, 2, 6, "cosine", 0.1, 0.1, 6, "constant"
    )
    for step in range(6):
        if wrapped:
            chunk.zero_grad_buffer()
        ours.zero_grad()
        loss_of(net, step).backward()
        result = ours.step()
        reference.zero_grad()
        loss_of(theirs, step).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip or float("inf"))
        for group in reference.param_groups:
            group["lr"] = [0.0, 0.05, 0.1, 0.0868198051533946, 0.055, 0.0231801948466054][step]
        reference.step()
        assert result.update_successful
        assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-12)
        assert norm > 0.5
        scheduler.step(1)
    for p, q in zip(net.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_groups():
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, min_lr=1e-4, weight_decay=0.2), [make_net()]
    )
    decayed, plain = optimizer.param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(7, 4), (8, 4)]
    assert [tuple(p.shape) for p in plain["params"]] == [(8,), (8,), (8,)]
    assert (decayed["wd_mult"], plain["wd_mult"]) == (1.0, 0.0)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)
    for group in (decayed, plain):
        assert (group["lr"], group["lr_mult"]) == (1e-3, 1.0)
        assert "max_lr" not in group
        assert "min_lr" not in group


def test_a_stage_without_parameters():
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1.0), [nn.Identity()])
    assert optimizer.step().grad_norm == 0
    assert len(optimizer.param_groups) == 2
    assert optimizer.step_count == 1  # as on the ranks that have some


def test_frozen_parameters_stay():
    net = make_net()
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1.0), [wrap(net)])
    loss_of(net, 0).backward()
    optimizer.step()
    assert torch.equal(net[0].weight, before)
    assert all(name != "0.weight" for name, _, _ in optimizer.named_states())


def test_a_learning_rate_is_needed():
    with pytest.raises(ConfigError, match="lr"):
        get_megatron_optimizer(OptimizerConfig(), [make_net()])


@pytest.mark.parametrize(
    "options",
    [{"lr": 1e-3, "min_lr": 1e-2}, {"clip_grad": -1.0}, {"adam_beta2": 1.0}, {"adam_eps": 0.0}],
)
def test_config_refuses(options):
    with pytest.raises(ConfigError):
        OptimizerConfig(**options)


@pytest.mark.parametrize("wrapped", [False, True])
def test_bf16_parameters_have_fp32_main_parameters(wrapped):
    net = make_net(torch.bfloat16)
    start = [p.detach().float() for p in net.parameters()]
    chunk = wrap(net) if wrapped else net
    config = OptimizerConfig(lr=1e-4, weight_decay=0.1, clip_grad=0.0, **BETAS)
    optimizer = get_megatron_optimizer(config, [chunk])
    main = [nn.Parameter(p) for p in start]
    reference = torch_adamw([("", p) for p in main], 1e-4, 0.1)
    for step in range(3):
        if wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        loss_of(net, step).backward()
        for p, q in zip(main, net.parameters(), strict=True):
            grad = q.main_grad if wrapped else q.grad
            p.grad = grad.clone().float()
        optimizer.step()
        reference.step()
        states = list(optimizer.named_states())
        for p, q, (_, param, state) in zip(main, net.parameters(), states, strict=True):
            assert param is q
            torch.testing.assert_close(state["main_param"], p.detach(), rtol=1e-6, atol=1e-8)
            assert torch.equal(q, state["main_param"].bfloat16())
    # Three steps of 1e-4 are lost on bf16 weights around 1, not on their main parameters.
    assert torch.equal(net[2].weight, torch.ones(8, dtype=torch.bfloat16))
    assert (main[3] != 1.0).any()


def test_reload_model_params():
    net = make_net(torch.bfloat16)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), [net])
    nn.init.constant_(net[1].weight, 0.25)
    optimizer.reload_model_params()
    states = {name: state for name, _, state in optimizer.named_states()}
    assert states["1.weight"]["main_param"].unique().tolist() == [0.25]


def test_state_can_be_loaded_before_the_first_step():
    def run(net, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()

    config = OptimizerConfig(lr=1e-2, **BETAS)
    straight = make_net(torch.bfloat16)
    first = get_megatron_optimizer(config, [straight])
    run(straight, first, range(3))
    resumed = copy.deepcopy(straight)
    second = get_megatron_optimizer(config, [resumed])
    saved = {name: state for name, _, state in first.named_states()}
    for name, param, state in second.named_states():
        assert set(state) == {"exp_avg", "exp_avg_sq", "main_param"}
        for key, tensor in state.items():
            assert tensor.shape == param.shape
            tensor.copy_(saved[name][key])
    second.step_count = first.step_count
    assert second.step_count == 3
    run(straight, first, range(3, 6))
    run(resumed, second, range(3, 6))
    for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


class NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "reads a tensor's value"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_never_reads_from_the_device(dtype):
    net = make_net(dtype)
    ddp = wrap(net)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [ddp])
    loss_of(net, 0).backward()
    with NoHostReads():
        result = optimizer.step()
    assert result.update_successful


def step_with_a_bad_gradient(bad_rank, value):
    context = parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    net = make_net(torch.float32)
    rows = Piece(0, 8 * context.tp.rank, 8)
    set_sharding(net[1].weight, ParamSharding((16, 4), 0, (rows,)))
    ddp = wrap(net)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [ddp])
    loss_of(net, 0).backward()
    optimizer.step()
    states = [s for _, _, state in optimizer.named_states() for s in state.values()]
    before = [t.detach().clone() for t in [*net.parameters(), *states]]
    ddp.zero_grad_buffer()
    loss_of(net, 1).backward()
    if context.tp.rank == bad_rank:
        net[1].weight.main_grad[0, 0] = value
    result = optimizer.step()
    unchanged = all(map(torch.equal, before, [*net.parameters(), *states]))
    return bool(result.update_successful), result.grad_norm, unchanged, optimizer.step_count


@pytest.mark.dist
@pytest.mark.parametrize(("bad_rank", "value"), [(0, float("nan")), (1, float("inf"))])
def test_a_bad_gradient_on_one_rank_changes_nothing_on_any(bad_rank, value):
    for result in run_distributed(step_with_a_bad_gradient, 2, bad_rank, value):
        successful, norm, unchanged, count = result
        assert not successful
        assert not norm.isfinite()
        assert unchanged
        assert count == 1


@pytest.mark.parametrize("rule", ["adam", "sgd", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vetoed_update_changes_nothing_and_reads_nothing(rule, dtype):
    net = make_net(dtype)
    ddp = wrap(net)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, optimizer=rule), [ddp])
    loss_of(net, 0).backward()
    optimizer.step()
    states = [s for _, _, state in optimizer.named_states() for s in state.values()]
    before = [t.detach().clone() for t in [*net.parameters(), *states]]
    ddp.zero_grad_buffer()
    loss_of(net, 1).backward()
    seen = []
    with NoHostReads():
        result = optimizer.step(lambda norm: seen.append(norm) or norm > 0)
    assert not result.update_successful
    assert seen[0] == result.grad_norm > 0
    assert all(map(torch.equal, before, [*net.parameters(), *states]))
