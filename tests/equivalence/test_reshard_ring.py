"""A checkpoint goes round a ring of layouts: bit for bit the same, and training goes on with it."""

from functools import partial

import pytest

from mcore.checkpoint import CheckpointReader, dump
from tests.equivalence.program import (
    SINGLE,
    Layout,
    largest_difference,
    save_again,
    train,
    train_and_inspect,
)
from tests.equivalence.test_golden import Family
from tests.equivalence.test_layouts import VARIANTS
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

#: No tensor has an equal share for each of 2, 3 or 5 ranks; the batch has.
ODD = (
    "--num-layers 2 --hidden-size 60 --ffn-hidden-size 177 --vocab-size 101 --global-batch-size 30"
)
ODD_RING = [
    (Layout(dp=2), f"{ZERO} optim"),
    (Layout(dp=3), f"{ZERO} optim_grads"),
    (Layout(dp=5), f"{ZERO} optim_grads_params"),
    (SINGLE, ""),
]

GOLDEN_MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32 "
    "--openai-gelu --hidden-dropout 0 --attention-dropout 0"
)


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


def dumped(root, out):
    out.unlink(missing_ok=True)
    dump(CheckpointReader(root), out)
    return out.read_bytes()


def go_round(hops, folder, words_with, reference):
    """From `folder`/start through all layouts.

    Args:
        hops: layouts and their options.
        folder: where everything is saved.
        words_with: gives a command line with further words.
        reference: records of the iterations that follow the start.
    """
    previous = folder / "start"
    wanted = dumped(previous, folder / "dump")
    for number, (layout, options) in enumerate(hops):
        target = folder / f"hop{number}"
        saving = f"--save {target} --save-interval 100 --load {previous} --skip-train"
        words = words_with(options, saving)
        train_and_inspect(words, layout, partial(save_again, words))
        assert dumped(target, folder / "dump") == wanted, layout
        records = train(words_with(options, f"--load {target} --exit-interval 5"), layout)
        assert largest_difference(records, reference) < 1e-5, layout
        previous = target


@pytest.mark.dist
@pytest.mark.parametrize(
    ("hops", "variant"),
    [
        pytest.param(RING[4:6], "", id="short"),
        pytest.param(RING + MORE, "", marks=pytest.mark.full, id="whole"),
        # Gate and up rows, query groups (of which tp 4 has too few), QKV bias.
        pytest.param(RING + MORE, VARIANTS["llama"], marks=pytest.mark.full, id="llama"),
        pytest.param(ODD_RING, ODD, marks=pytest.mark.full, id="odd"),
    ],
)
def test_ring(corpus, tmp_path, hops, variant):
    words_with = partial(words_of, corpus, variant)
    start = tmp_path / "start"
    train(words_with(f"--save {start} --save-interval 3 --exit-interval 3"), SINGLE)
    go_round(hops, tmp_path, words_with, train(words_with(f"--load {start}"), SINGLE))


@pytest.mark.dist
@pytest.mark.full
def test_ring_of_the_golden_model(tmp_path):
    """After each hop training goes on as Hugging Face's model and torch's AdamW do."""
    family = Family("gpt2_8layers", tmp_path)
    start = f"--save {tmp_path}/start --save-interval 3 --exit-interval 3"
    train([*family.command(1), *start.split()], SINGLE)
    words = [w for w in family.command(1) if w not in ("--finetune", "--use-checkpoint-args")]
    go_round(
        RING + MORE,
        tmp_path,
        lambda *more: [*words, *" ".join((GOLDEN_MODEL, *more)).split()],
        family.reference["iterations"][3:5],
    )
