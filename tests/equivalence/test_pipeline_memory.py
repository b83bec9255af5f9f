"""Activations that a pipeline rank holds: live bytes that autograd saved for backward."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mcore.training.gpt import datasets_provider, model_provider
from mcore.training.pretrain import Providers
from pretrain_gpt import forward_step
from tests.equivalence.program import Layout, train_and_inspect
from tests.equivalence.tiny import SEQUENCE, VOCABULARY, command


class Meter:
    """Bytes of live tensors that autograd saved; memory that tensors share counts once."""

    def __init__(self) -> None:
        self.peak = self._now = 0
        self._users: dict[int, int] = {}

    def save(self, tensor: Tensor, kept: set[int]) -> _Saved:
        """Count a tensor until autograd lets go of it.

        Args:
            tensor: what is saved.
            kept: addresses of memory that is there anyway (parameters).
        """
        saved = _Saved(tensor)
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in kept:
            self._add(address, size)
            weakref.finalize(saved, self._drop, address, size)
        return saved

    def _add(self, address: int, size: int) -> None:
        self._users[address] = self._users.get(address, 0) + 1
        if self._users[address] == 1:
            self._now += size
            self.peak = max(self.peak, self._now)

    def _drop(self, address: int, size: int) -> None:
        self._users[address] -= 1
        if self._users[address] == 0:
            del self._users[address]
            self._now -= size


class _Saved:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


METER = Meter()


def measured_forward_step(data_iterator: Any, model: nn.Module) -> Any:
    kept = {buffer.data_ptr() for buffer in map(torch.Tensor.untyped_storage, model.parameters())}
    with saved_tensors_hooks(lambda tensor: METER.save(tensor, kept), lambda saved: saved.tensor):
        return forward_step(data_iterator, model)


def take_peak(state: Any) -> int:
    del state
    peak, METER.peak = METER.peak, 0
    assert not METER._users
    return peak


PROVIDERS = Providers(datasets_provider, model_provider, measured_forward_step)


def peaks(corpus: str, layout: Layout, m: int, *flags: str) -> list[int]:
    """Peak of each rank over two steps of m microbatches."""
    sizes = f"--global-batch-size {m} --hidden-dropout 0 --attention-dropout 0"
    words = command(corpus, 2, sizes, *flags)
    return train_and_inspect(words, layout, take_peak, providers=PROVIDERS)


@pytest.mark.dist
@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.full)])
def test_peak_activations_of_1f1b_do_not_grow_with_the_batch_and_those_of_gpipe_do(corpus, pp):
    layout = Layout(pp=pp)
    one = peaks(corpus, layout, 1)
    few, many = peaks(corpus, layout, 4), peaks(corpus, layout, 16)
    all_few = peaks(corpus, layout, 4, "--pipeline-schedule gpipe")
    all_many = peaks(corpus, layout, 16, "--pipeline-schedule gpipe")
    print(f"bytes by rank: m = 1 {one}; 1f1b {few} {many}; gpipe {all_few} {all_many}")
    heads, hidden = 4, 32  # of `command`; norms and attention keep 4 + heads numbers a row
    layers = [4 * SEQUENCE * (16 * hidden + heads + 4) * 4 // pp] * pp
    layers[0] += 2 * 8 * SEQUENCE  # token and position ids
    # The last norm with its input and row statistics, its output, the logits; labels, loss mask.
    layers[-1] += 4 * SEQUENCE * (hidden + 2 + hidden + VOCABULARY) + (8 + 4) * SEQUENCE
    assert one == layers
    for rank in range(pp):
        assert many[rank] == pytest.approx(few[rank], rel=0.05)
        assert few[rank] == pytest.approx((pp - rank) * one[rank], rel=0.05)
        assert all_few[rank] == pytest.approx(4 * one[rank], rel=0.05)
        assert all_many[rank] == pytest.approx(16 * one[rank], rel=0.05)
