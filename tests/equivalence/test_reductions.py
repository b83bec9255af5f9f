"""No gradient is lost, and no weight is late: accumulation and overlap against the plain way."""

import time

import pytest
import torch

from mcore.training.gpt import datasets_provider, model_provider
from pretrain_gpt import forward_step
from tests.equivalence.program import (
    Layout,
    Providers,
    largest_difference,
    largest_relative_difference,
    series,
    train,
)
from tests.equivalence.tiny import command


class _Masked:
    """Micro batches in which every fourth sample counts with one token only."""

    def __init__(self, inner):
        self._inner = inner

    def __next__(self):
        batch = next(self._inner)
        rows = batch["dropout_state"].sample_index % 4 == 0
        mask = batch["loss_mask"].clone()
        mask[rows, 1:] = 0.0
        return {**batch, "loss_mask": mask}


def masking_forward_step(data_iterator, model):
    return forward_step(_Masked(data_iterator), model)


@pytest.mark.parametrize("stage", [0, 2, 3, pytest.param(1, marks=pytest.mark.full)])
def test_every_microbatch_counts_by_its_tokens(corpus, stage):
    """A first micro batch of one valid token: the same numbers as in one large micro batch."""
    flags = f"--zero-stage {stage} --global-batch-size 8"
    providers = Providers(datasets_provider, model_provider, masking_forward_step)
    many, one = (
        train(command(corpus, 3, flags, micro=micro), Layout(dp=2), providers=providers)
        for micro in (1, 4)
    )
    assert largest_difference(many, one) <= 3e-6
    assert largest_relative_difference(many, one) <= 1e-5
    tokens = {record["tokens"] for record in many}
    assert all(count < 8 * 16 - 2 * 14 for count in tokens)  # two samples were masked


def slow_forward_step(data_iterator, model):
    """On one rank every micro batch comes late, each by another time."""
    if torch.distributed.get_rank() == 1:
        time.sleep(0.003 * (data_iterator.iteration % 3))
    return forward_step(data_iterator, model)


@pytest.mark.parametrize(
    ("layout", "stage", "iterations"),
    [
        (Layout(dp=2), 1, 15),
        pytest.param(Layout(dp=2), 1, 50, marks=pytest.mark.full),
        pytest.param(Layout(dp=2), 2, 50, marks=pytest.mark.full),
        pytest.param(Layout(dp=4), 1, 50, marks=pytest.mark.full),
        pytest.param(Layout(pp=2, vpp=2, dp=2), 1, 50, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_overlap_with_a_slow_rank_changes_no_bit(corpus, layout, stage, iterations):
    """One parameter a bucket, gathered while the next forward runs, one rank late.

    Without clipping, since the norm is summed bucket by bucket and rounds accordingly.
    """
    flags = f"--zero-stage {stage} --clip-grad 0"
    plain = train(command(corpus, iterations, flags), layout)
    overlap = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1"
    providers = Providers(datasets_provider, model_provider, slow_forward_step)
    late = train(command(corpus, iterations, flags, overlap), layout, providers=providers)
    assert series(late, "lm_loss") == series(plain, "lm_loss")
    assert largest_relative_difference(late, plain) <= 1e-6
    assert late[-1]["lm_loss"] < late[0]["lm_loss"] - 0.3


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "stage"), [(Layout(dp=2), 1), (Layout(dp=4), 1), (Layout(dp=2), 2)], ids=str
)
def test_each_forward_uses_the_weights_of_the_step_before(corpus, tmp_path, layout, stage):
    """Scenario B08: the losses of the overlapped run against those of the weights on disk."""
    options, save = f"--zero-stage {stage}", str(tmp_path / "save")
    overlap = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1"
    providers = Providers(datasets_provider, model_provider, slow_forward_step)
    late = train(command(corpus, 6, options, overlap), layout, providers=providers)
    train(command(corpus, 6, options, "--save-interval 1 --save", save), layout)
    for step in range(1, 6):
        words = ["--load", save, "--ckpt-step", str(step), "--exit-interval", str(step + 1)]
        (record,) = train([*command(corpus, 6), *words])
        assert record["iteration"] == step + 1
        assert abs(record["lm_loss"] - late[step]["lm_loss"]) <= 1e-6
