"""State in host memory: the same numbers. The move itself is tried from the CPU to the CPU."""

import weakref

import pytest
import torch
from torch import nn

from mcore import parallel_state
from mcore.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
)
from mcore.models.gpt import GPTModel
from mcore.optimizer import OptimizerConfig, get_megatron_optimizer, param_groups
from mcore.testing import run_distributed
from mcore.transformer import TransformerConfig


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_in_host_memory(dtype):
    """Main parameters, moments, and where gradients arrive: what `--log-memory` tells."""
    net = make_net(dtype)
    optimizer = optimizer_of(net, optimizer_cpu_offload=True)
    held = sum(tensor.nbytes for _, tensor in optimizer.held_tensors())
    assert held == 16 * sum(p.numel() for p in net.parameters())


@pytest.mark.usefixtures("movable")
def test_the_norm_of_parameters_brings_them_to_the_device_one_by_one(monkeypatch):
    net = make_net(torch.bfloat16)
    optimizer = optimizer_of(net, optimizer_cpu_offload=True, log_params_norm=True)
    copies, alive = [], []

    def to(self, _):
        copy = self.clone()
        copies.append(weakref.ref(copy))
        alive.append(sum(made() is not None for made in copies))
        return copy

    monkeypatch.setattr(torch.Tensor, "to", to)
    norm = optimizer._params_norm()
    monkeypatch.undo()
    assert len(copies) == 6
    assert max(alive) <= 2
    wanted = torch.cat([item.main.detach().flatten() for item in optimizer.params]).norm()
    assert float(norm) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.usefixtures("movable")
def test_host_copies_follow_a_model_that_was_read():
    net = make_net(torch.float32)
    optimizer = optimizer_of(net, optimizer_cpu_offload=True)
    with torch.no_grad():
        net[0].weight.fill_(2.0)
    optimizer.refresh_host_copies()
    assert all(bool((item.main == item.part.data).all()) for item in optimizer.params)


def offloading(chunk, **options):
    """An optimizer of a chunk, as with `movable` in another process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(param_groups, "is_on_host", lambda _: False)
        config = OptimizerConfig(lr=0.01, optimizer_cpu_offload=True, **options)
        return get_megatron_optimizer(config, [chunk])


def read_into_shards():
    parallel_state.initialize_model_parallel()
    options = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    chunk = FullyShardedDataParallel(None, options, make_net(torch.bfloat16))
    optimizer = offloading(chunk)
    for _, _, tensors in optimizer.named_states():
        tensors["main_param"].fill_(2.0)  # as a checkpoint's
    optimizer.refresh_host_copies()
    output = chunk(torch.ones(1, 6, dtype=torch.bfloat16))
    shards = [part.data for part in chunk.own_parts()]
    # The norm's input is alike everywhere, so that it returns its bias: 8 x 2 x 2 + 2.
    return all(bool((shard == 2.0).all()) for shard in shards), output.flatten().tolist()


@pytest.mark.dist
def test_shards_follow_main_parameters_that_were_read():
    assert run_distributed(read_into_shards, 2) == [(True, [34.0] * 3)] * 2


def choose_with_a_tied_embedding(fraction):
    context = parallel_state.initialize_model_parallel(1, 2)
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    first = context.pp.is_first
    model = GPTModel(
        config,
        vocab_size=16,
        max_sequence_length=4,
        pre_process=first,
        post_process=not first,
        share_embeddings_and_output_weights=True,
    )
    options = DistributedDataParallelConfig()
    chunk = DistributedDataParallel(config, options, model)
    params = offloading(chunk, optimizer_offload_fraction=fraction).params
    return {item.name for item in params if item.is_offloaded}


@pytest.mark.dist
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_copies_of_a_tied_embedding_go_together_or_not_at_all(fraction):
    first, last = run_distributed(choose_with_a_tied_embedding, 2, fraction)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in first
    tied = "embedding.word_embeddings.weight"
    assert (tied in first, tied in last) == (fraction == 1.0, fraction == 1.0)


def test_on_the_cpu_nothing_moves():
    net = make_net(torch.float32)
    optimizer = optimizer_of(net, optimizer_cpu_offload=True)
    assert not any(item.is_offloaded for item in optimizer.params)
    assert optimizer.params[0].main.data_ptr() == net[0].weight.data_ptr()
