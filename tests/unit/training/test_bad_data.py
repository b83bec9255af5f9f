"""Data that cannot be trained on is refused by name before the first step."""

import shutil

import numpy as np
import pytest

from mcore.data import IndexedDatasetBuilder
from mcore.errors import ConfigError, DataError
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
    with pytest.raises(ConfigError, match="training split is empty; .*--split"):
        train(command(corpus, 2, "--split 0,100,0"))


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
