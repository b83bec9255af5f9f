"""A checkpoint goes round a ring of layouts: bit for bit the same, and training goes on with it."""

from functools import partial

import pytest

from mcore.checkpoint import CheckpointReader, dump
from mcore.training import checkpointing
from mcore.training.arguments import build_config, parse
from mcore.training.checkpoint_writer import CheckpointWriter
from tests.equivalence.program import (
    SINGLE,
    Layout,
    largest_difference,
    train,
    train_and_inspect,
)
from tests.equivalence.tiny import command

ZERO = "--data-parallel-sharding-strategy"
RING = [
    (Layout(tp=2, pp=2), ""),
    (Layout(dp=3), ""),
    (Layout(tp=4), ""),
    (Layout(pp=4), ""),
    (Layout(tp=2, dp=2), f"{ZERO} optim"),
    (Layout(pp=2, dp=2), f"{ZERO} optim_grads_params"),
    (Layout(tp=2, pp=2), ""),
]
MORE = [
    (Layout(dp=4), f"{ZERO} optim_grads"),
    (Layout(dp=3), f"{ZERO} optim_grads_params"),
    (Layout(pp=2, dp=2, vpp=2), f"{ZERO} optim"),
    (Layout(tp=2, sp=True, pp=2), "--decoder-first-pipeline-num-layers 5"),
    (Layout(tp=2, pp=2), ""),
]


def words_of(corpus, *more):
    """Eight layers, global batch 12, vocabulary 997 whose padding changes with the layout."""
    words = command(corpus, 5, *more)
    for name, value in (
        ("--num-layers", "8"),
        ("--vocab-size", "997"),
        ("--make-vocab-size-divisible-by", "64"),
        ("--global-batch-size", "12"),
    ):
        words[words.index(name) + 1] = value
    return words


def save_again(words, state):
    config = build_config(parse(words))
    writer = CheckpointWriter(config.checkpoint)
    checkpointing.save(state, config, state.optimizer.context, writer)


def dumped(root, out):
    out.unlink(missing_ok=True)
    dump(CheckpointReader(root), out)
    return out.read_bytes()


@pytest.mark.dist
@pytest.mark.parametrize(
    "hops",
    [RING[4:6], pytest.param(RING + MORE, marks=pytest.mark.full)],
    ids=["short", "whole"],
)
def test_ring(corpus, tmp_path, hops):
    start = tmp_path / "start"
    train(words_of(corpus, f"--save {start} --save-interval 3 --exit-interval 3"), SINGLE)
    wanted = dumped(start, tmp_path / "dump")
    reference = train(words_of(corpus, f"--load {start}"), SINGLE)
    previous = start
    for number, (layout, options) in enumerate(hops):
        target = tmp_path / f"hop{number}"
        saving = f"--save {target} --save-interval 100 --load {previous} --skip-train"
        words = words_of(corpus, options, saving)
        train_and_inspect(words, layout, partial(save_again, words))
        assert dumped(target, tmp_path / "dump") == wanted, layout
        records = train(words_of(corpus, options, f"--load {target}"), layout)
        assert largest_difference(records, reference) < 1e-5, layout
        previous = target
