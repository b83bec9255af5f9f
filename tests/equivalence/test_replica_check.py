"""A replica whose bits have changed is found and named; sound replicas never are."""

import pytest
import torch

from mcore.errors import ConfigError
from mcore.training.gpt import datasets_provider, model_provider
from mcore.training.replica_check import hash_bits
from pretrain_gpt import forward_step
from tests.equivalence.program import Layout, Providers, layout_id, train
from tests.equivalence.tiny import command

CHECK = "--check-weight-hash-across-dp-replicas-interval"
NAME = "decoder.layers.2.mlp.linear_fc1.weight"


class CorruptsOnce:
    """A forward step that, on one rank, flips the last bit of one weight at an iteration."""

    def __init__(self, rank, iteration):
        self.rank, self.iteration = rank, iteration

    def __call__(self, data_iterator, model):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if data_iterator.iteration == self.iteration and rank == self.rank:
            for name, param in model.named_parameters():
                if name.endswith(NAME):
                    param.data.view(torch.int32)[3, 5] ^= 1
        return forward_step(data_iterator, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_bit_changes_the_hash(dtype):
    x = torch.randn(50, dtype=dtype)
    first = hash_bits(x)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    for place in (0, 17, 49):
        for bit in range(8 * x.element_size() - 1):
            changed = x.clone()
            changed.view(integers)[place] ^= 1 << bit
            assert not torch.equal(hash_bits(changed), first), (place, bit)
    assert torch.equal(hash_bits(x.clone()), first)
    assert not torch.equal(hash_bits(x.flip(0)), first)


def test_a_long_tensor_is_hashed_in_runs(monkeypatch):
    x = torch.randn(1000)
    whole = hash_bits(x)
    monkeypatch.setattr("mcore.training.replica_check._CHUNK", 64)
    assert torch.equal(hash_bits(x), whole)


def test_a_corrupted_replica_is_named(corpus):
    words = command(corpus, 6, "--global-batch-size 3", CHECK, "2")
    providers = Providers(datasets_provider, model_provider, CorruptsOnce(1, 3))
    with pytest.raises(Exception, match="not the same on all data-parallel ranks") as caught:
        train(words, Layout(dp=3), providers=providers)
    message = str(caught.value)
    assert "iteration 4" in message  # the first check after the corruption
    assert f"{NAME}: rank 1 differs from the other 2" in message


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout(tp=2, dp=2, sp=True), "--zero-stage 1 --overlap-param-gather"),
        pytest.param(Layout(pp=2, dp=2), "--zero-stage 2", marks=pytest.mark.full),
        pytest.param(
            Layout(dp=4),
            "--zero-stage 3 --num-distributed-optimizer-instances 2",
            marks=pytest.mark.full,
        ),
    ],
    ids=layout_id,
)
def test_sound_replicas_pass(corpus, layout, flags):
    records = train(command(corpus, 3, flags, CHECK, "1"), layout)
    assert len(records) == 3


def test_shards_without_replicas_are_refused(corpus):
    with pytest.raises(ConfigError, match="no parameter has a replica"):
        train(command(corpus, 2, "--zero-stage 3", CHECK, "1"))
