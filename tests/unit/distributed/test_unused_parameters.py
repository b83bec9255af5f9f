"""Parameters that some data-parallel ranks, or all, make no use of, at every ZeRO stage."""

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
from mcore.errors import ConfigError, ScheduleError
from mcore.testing import run_distributed


class Layer(nn.Module):
    """A linear map, with a second one on demand."""

    def __init__(self):
        super().__init__()
        self.fc, self.gate = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, gated):
        return torch.tanh(self.fc(x) * self.gate(x) if gated else self.fc(x))


class Net(nn.Module):
    """Two layers and a part that only takes part on demand."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.extra = nn.Linear(6, 6)

    def forward(self, x, use_extra=False, gated=False):
        for layer in self.layers:
            x = layer(x, gated)
        return self.extra(x) if use_extra else x


def make_net():
    torch.manual_seed(0)
    return Net().double()


def make_data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 2, 5, 6, dtype=torch.float64, generator=generator)  # rank, microbatch


def wrap(stage, **options):
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=STRATEGIES[stage], bucket_size=1, **options
    )
    chunk = (FullyShardedDataParallel if stage == 3 else DistributedDataParallel)(
        None, config, make_net()
    )
    chunk.zero_grad_buffer()
    return chunk


def own_gradients(chunk):
    """(name, first element, gradient of this rank's run)."""
    return [(p.name, p.run.start, chunk.own_grad(p.param).flatten()) for p in chunk.own_parts()]


def gradients_of(stage, used, overlap):
    """Two backwards without `no_sync`, `used[rank]` being what each forward is told."""
    context = parallel_state.initialize_model_parallel()
    try:
        chunk = wrap(stage, overlap_grad_reduce=overlap)
        mine = make_data()[context.dp.rank]
        losses = [chunk(x, **used[context.dp.rank]).square().sum() for x in mine]
        for loss in losses if stage in (1, 2) else [sum(losses)]:
            loss.backward()
        finalize_model_grads([chunk])
        return own_gradients(chunk)
    finally:
        parallel_state.destroy_model_parallel()


def reference(used):
    net = make_net()
    for kwargs, mine in zip(used, make_data(), strict=True):
        for x in mine:
            (net(x, **kwargs).square().sum() / 2).backward()
    zero = torch.zeros((), dtype=torch.float64)
    return {n: (zero if p.grad is None else p.grad) for n, p in net.named_parameters()}


def check(stage, used, overlap=False):
    expected = reference(used)
    seen = 0
    for parts in run_distributed(gradients_of, 2, stage, used, overlap):
        for name, start, grad in parts:
            whole = expected[name].expand_as(make_net().get_parameter(name)).flatten()
            torch.testing.assert_close(grad, whole[start : start + grad.numel()])
            seen += grad.numel()
    assert seen == sum(g.numel() for g in make_net().parameters()) * (1 if stage else 2)


@pytest.mark.dist
@pytest.mark.parametrize("stage", range(4))
def test_unused_on_all_ranks(stage):
    check(stage, [{}, {}])


@pytest.mark.dist
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("user", [0, 1])
def test_a_part_that_one_rank_uses_with_gradients_that_are_shared_out(user, overlap):
    used = [{}, {}]
    used[user] = {"use_extra": True}
    check(2, used, overlap)


@pytest.mark.dist
@pytest.mark.parametrize("stage", range(4))
def test_a_part_of_a_layer_that_one_rank_uses(stage):
    check(stage, [{"gated": True}, {}])


def use_alone(user):
    context = parallel_state.initialize_model_parallel()
    chunk = wrap(3)
    x = make_data()[context.dp.rank][0]
    try:
        chunk(x, use_extra=context.dp.rank == user).sum().backward()
        finalize_model_grads([chunk])
    except ScheduleError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
@pytest.mark.parametrize("user", [0, 1])
def test_a_gathered_part_that_one_rank_uses_is_an_error_on_both(user):
    first, second = run_distributed(use_alone, 2, user, timeout=60)
    assert first == second
    assert f"rank {user} is at the forward of extra" in first
    assert f"rank {1 - user} is at the backward of" in first


def mixed(names):
    parallel_state.initialize_model_parallel()
    net = Net()
    for name in names:
        net.get_submodule(name).bfloat16()
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy=STRATEGIES[3])
    try:
        chunk = FullyShardedDataParallel(None, config, net)
    except ConfigError as error:
        return str(error)
    seen = {}
    for name, unit in net.named_modules():
        if isinstance(unit, nn.Linear):
            unit.register_forward_pre_hook(
                lambda module, _, name=name: seen.update({name: module.weight.dtype})
            )
    x = torch.ones(2, 6, dtype=torch.bfloat16)
    for layer in net.layers:
        x = layer(x, True)
    net.extra(x.float())
    assert {part.data.dtype for part in chunk.held_parts()} == {torch.float32}
    return seen


@pytest.mark.dist
def test_every_part_computes_in_its_own_dtype_at_stage_3():
    for seen in run_distributed(mixed, 2, ["layers"]):
        assert seen.pop("extra") == torch.float32
        assert set(seen.values()) == {torch.bfloat16}
        assert len(seen) == 4


@pytest.mark.dist
def test_dtypes_mixed_inside_a_layer_are_refused_by_name():
    for message in run_distributed(mixed, 2, ["layers.0.fc"]):
        assert "layers.0.fc.bias in bfloat16" in message
        assert "layers.0.gate.bias in float32" in message
