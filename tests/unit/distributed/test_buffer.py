import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mcore.config.distributed import DistributedDataParallelConfig
from mcore.distributed.param_and_grad_buffer import (
    ALIGNMENT,
    ParamAndGradBuffer,
    plan_buffer,
)
from mcore.distributed.sharding_groups import ShardingGroups
from mcore.errors import ConfigError
from mcore.topology.group import Group


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), st.none() | st.integers(1, 2000))
def test_layout_covers_every_parameter_once(numels, bucket_size):
    layout = plan_buffer(numels, bucket_size)
    end = 0
    for start, numel in zip(layout.starts, numels, strict=True):
        assert end <= start < end + ALIGNMENT
        assert start % ALIGNMENT == 0
        end = start + numel
    edge, members = 0, []
    for i, (start, stop, inside) in enumerate(layout.buckets):
        assert start == edge
        for j in inside:
            assert start <= layout.starts[j]
            assert layout.starts[j] + numels[j] <= stop
        if bucket_size is not None and i < len(layout.buckets) - 1:
            assert stop - start >= bucket_size
            assert layout.starts[inside[-1]] - start < bucket_size
        edge, members = stop, members + list(inside)
    assert edge == layout.numel
    assert members == list(range(len(numels)))
    assert bucket_size is not None or len(layout.buckets) == 1


def test_parameters_and_gradients_are_views():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    params = list(enumerate(model.parameters()))
    buffer = ParamAndGradBuffer(
        params, torch.float32, 64, ShardingGroups(*[Group.single("dp-cp")] * 3)
    )
    assert buffer.params[0] is model[1].bias
    assert [bucket.position for bucket in buffer.buckets] == [3, 2, 1, 0]
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
        param.main_grad.fill_(1.0)
    buffer.param_data.zero_()
    assert all(not param.any() for param in model.parameters())
    assert buffer.grad_data.sum() == sum(param.numel() for param in model.parameters())
    buffer.scale_grad(torch.tensor(0.5, dtype=torch.float64))
    assert model[0].weight.main_grad.unique().tolist() == [0.5]
    buffer.zero_grad()
    assert not model[0].weight.main_grad.any()


@pytest.mark.parametrize(
    "options", [{"bucket_size": 1, "num_buckets": 1}, {"bucket_size": 0}, {"num_buckets": -1}]
)
def test_config_refuses(options):
    with pytest.raises(ConfigError, match="bucket"):
        DistributedDataParallelConfig(**options)
