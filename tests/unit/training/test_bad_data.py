"""Data that cannot be trained on is refused by name before the first step."""

import shutil

import numpy as np
import pytest

from mcore.data import IndexedDatasetBuilder
from mcore.errors import ConfigError, DataError
from mcore.training.arguments import build_config, parse
from mcore.training.setup import check_datasets
from tests.equivalence.program import Layout, train
from tests.equivalence.tiny import command, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text_document")


def write_tokens(prefix, tokens):
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        builder.add_item(tokens)
        builder.end_document()
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_an_absent_corpus(tmp_path):
    with pytest.raises(DataError, match="absent_text_document"):
        train(command(f"{tmp_path}/absent_text_document", 2))


@pytest.mark.parametrize("name", ["bin", "idx"])
def test_half_a_corpus(corpus, tmp_path, name):
    shutil.copy(f"{corpus}.{name}", tmp_path)
    with pytest.raises(DataError, match="text_document"):
        train(command(f"{tmp_path}/text_document", 2))


def test_a_damaged_index(corpus, tmp_path):
    shutil.copy(f"{corpus}.bin", tmp_path)
    (tmp_path / "text_document.idx").write_bytes(b"not an index")
    with pytest.raises(DataError, match=r"text_document\.idx"):
        train(command(f"{tmp_path}/text_document", 2))


def test_an_empty_training_split(corpus):
    with pytest.raises(ConfigError, match=f"{corpus} is empty: --split 0,100,0 gives it no share"):
        train(command(corpus, 2, "--split 0,100,0"))


def test_a_share_without_a_sequence_that_is_measured_whole(corpus):
    words = command(corpus, 2, "--split 99.99,0.01,0 --full-validation --eval-iters 1")
    with pytest.raises(ConfigError, match=f"validation split of {corpus} is empty: its share"):
        train(words)


@pytest.mark.parametrize("way", ["--split 100,0,0", "--train-data-path"])
def test_evaluation_without_validation_data_is_a_choice_and_told(corpus, caplog, way):
    words = command(corpus, 2, "--eval-iters 5")
    at = words.index("--split")
    del words[at : at + 2]
    if way == "--train-data-path":
        words[words.index("--data-path")] = way
        why = "there is no --valid-data-path"
    else:
        words += way.split()
        why = "--split 100,0,0 gives it no share"
    check_datasets((range(8), None, None), (8, 5, 5), build_config(parse(words)))
    assert f"nothing will be evaluated, for there is no validation data beside {corpus}: {why}" in (
        caplog.text
    )


def test_more_than_there_is(corpus, tmp_path):
    other = write_corpus(tmp_path / "other", 30)
    words = command("DATA", 10_000)
    at = words.index("DATA")
    words[at : at + 1] = [corpus, other]
    with pytest.raises(ConfigError, match=rf"training data \({corpus} {other}\) has \d+ samples"):
        train(words)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 18])
def test_a_corpus_of_about_one_sample_is_repeated(tmp_path, length):
    """A sample of 16 reads 17 tokens; they may come from several passes."""
    prefix = write_tokens(tmp_path / "short", [5] * length)
    assert len(train(command(prefix, 2, "--split 100,0,0"))) == 2


@pytest.mark.dist
def test_a_corpus_of_another_vocabulary(tmp_path):
    """Whatever the layout: the message has the id and the vocabulary."""
    prefix = write_tokens(tmp_path / "foreign", [5] * 100 + [101] + [5] * 100)
    for layout in (Layout(), Layout(tp=2)):
        with pytest.raises(DataError, match=r"101.*vocabulary"):
            train(command(prefix, 9, "--split 100,0,0"), layout)


def test_labels_alone_can_be_foreign(tmp_path):
    """The last token of a sample is a label only."""
    prefix = write_tokens(tmp_path / "foreign", [5] * 16 + [700])
    with pytest.raises(DataError, match=r"700.*vocabulary"):
        train(command(prefix, 2, "--split 100,0,0"))
