"""Whole runs over data that gave other trainers trouble: tiny corpora, many epochs, odd blends."""

import os

import numpy as np
import pytest

from mcore.data import IndexedDatasetBuilder
from mcore.errors import ConfigError, DataError
from tests.equivalence.program import SINGLE, Layout, series, train
from tests.equivalence.tiny import SEQUENCE, command, write_corpus


def write_tokens(prefix, *lengths):
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for length in lengths:
            builder.add_item(np.arange(1, length + 1))
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def on(prefix, *more, iterations=3):
    words = command(prefix, iterations, *more)
    at = words.index("--split")
    words[at + 1] = "100,0,0"
    return words


@pytest.mark.parametrize("tokens", [1, SEQUENCE, SEQUENCE + 2])
def test_a_tiny_corpus_is_repeated(tmp_path, tokens):
    corpus = write_tokens(tmp_path / "c", tokens)
    assert series(train(on(corpus)), "iteration") == [1, 2, 3]


@pytest.mark.parametrize("tokens", [1, SEQUENCE])
def test_or_refused_with_the_numbers(tmp_path, tokens):
    corpus = write_tokens(tmp_path / "c", tokens)
    with pytest.raises(DataError, match=rf"{tokens} tokens .* needs {SEQUENCE + 1}"):
        train(on(corpus, "--data-order stable"))


def test_several_epochs_and_data_parallelism(tmp_path):
    """15 samples an epoch, 3.5 epochs: it ends at the last iteration, and nothing is written."""
    corpus = write_tokens(tmp_path / "c", *[SEQUENCE] * 15, 1)
    before = sorted(os.listdir(tmp_path))
    records = train(on(corpus, "--num-workers 2", iterations=13), Layout(dp=2))
    assert series(records, "consumed_train_samples")[-1] == 52
    assert sorted(os.listdir(tmp_path)) == before


def test_a_share_that_rounds_to_nothing(tmp_path, capsys):
    """The order gives the first corpus of little weight a sample at once; the other gets none."""
    corpora = [write_corpus(tmp_path / name, 20) for name in ("a", "b", "c")]
    words = on("DATA", iterations=2)
    at = words.index("DATA")
    blend = zip(("0.998", "0.001", "0.001"), corpora, strict=True)
    words[at : at + 1] = [word for pair in blend for word in pair]
    assert series(train(words), "iteration") == [1, 2]
    told = [line for line in capsys.readouterr().out.splitlines() if "weight is too small" in line]
    assert len(told) == 1
    assert f"none of the 8 samples of the train split comes from {corpora[2]}" in told[0]


@pytest.mark.parametrize("split", ["98,1,1", "99.9,0.1,0"])
def test_an_empty_split_that_evaluation_asks_for(tmp_path, split):
    """An error that names the corpus, where Megatron loops without end."""
    corpus = write_tokens(tmp_path / "c", 40, 40, 40)
    words = command(corpus, 2, "--eval-iters 1")
    words[words.index("--split") + 1] = split
    with pytest.raises((DataError, ConfigError), match=str(tmp_path)):
        train(words)


def test_a_corpus_of_another_tokenizer(tmp_path):
    corpus = write_tokens(tmp_path / "c", 300)
    with pytest.raises(DataError, match="outside the vocabulary of 101"):
        train(on(corpus, "--num-workers 0"))


def test_what_a_global_batch_holds_does_not_depend_on_how_it_is_read(tmp_path):
    """The loss of every step, at data-parallel 1, 2 and 4, micro batch 1 and 2, with workers."""
    corpus = write_corpus(tmp_path / "c", 40)
    reference = train(on(corpus), SINGLE)
    for layout, micro, workers in ((Layout(dp=2), 2, 2), (Layout(dp=4), 1, 0), (SINGLE, 2, 2)):
        words = on(corpus, f"--micro-batch-size {micro} --num-workers {workers}")
        for got, want in zip(train(words, layout), reference, strict=True):
            assert abs(got["lm_loss"] - want["lm_loss"]) < 3e-6, (layout, micro, workers)
