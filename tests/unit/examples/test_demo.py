"""The demo's corpus, tokenizer training and yardstick."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from examples.demo import corpus, train_bpe, unigram
from mcore.config.tokenizer import TokenizerConfig
from mcore.tokenizers import build_tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "preprocess"


def test_docstrings_of_a_module(tmp_path):
    source = tmp_path / "m.py"
    source.write_text(
        '"""Module."""\n'
        'class A:\n    """A."""\n    def f(self):\n        """F."""\n'
        '    async def g(self):\n        """A."""\n'
        'def h():\n    x = "no docstring"\n'
    )
    found = list(corpus._docstrings(source, "m", set()))
    assert found == ["m\n\nModule.", "m.A\n\nA.", "m.A.f\n\nF."]
    assert list(corpus._docstrings(source, "n", {"Module.", "A."})) == ["n.A.f\n\nF."]
    source.write_text("not python")
    assert list(corpus._docstrings(source, "m", set())) == []


def test_documents_come_in_a_fixed_order():
    first = list(itertools.islice(corpus.documents(), 90))
    assert first == list(itertools.islice(corpus.documents(), 90))
    names = [name for name, _ in first]
    assert len(set(names)) == 90
    assert names[0].startswith("topic ")
    assert names[-1].startswith("module ")


def test_one_document_in_twenty_is_held_out():
    held_out = [corpus.is_held_out(f"module {i}") for i in range(20_000)]
    assert 900 < sum(held_out) < 1_100  # 1000 expected, standard deviation 31


def test_trained_vocabulary(tmp_path):
    texts = list(train_bpe.read_texts(GOLDEN / "corpus.jsonl"))
    vocab, merges = train_bpe.train_bpe(GOLDEN / "corpus.jsonl", tmp_path, vocab_size=400)
    tokenizer = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges)
        )
    )
    assert (tokenizer.vocab_size, tokenizer.eod) == (400, 0)
    ids = tokenizer.tokenize_batch(texts)
    assert [tokenizer.detokenize(part) for part in ids] == texts
    assert sum(map(len, ids)) < 0.7 * sum(len(text.encode()) for text in texts)


def test_unigram_perplexity_by_hand():
    # Counts with one added: 3, 2, 1 of 6; the validation tokens have 1/2, 1/3 and 1/6.
    found = unigram.unigram_perplexity(np.array([0, 0, 1]), np.array([0, 1, 2]), vocab_size=3)
    assert found == pytest.approx(36 ** (1 / 3), rel=1e-12)


def test_tokens_of_a_pair_of_files():
    prefix = str(GOLDEN / "bpe_text_document")
    expected = np.fromfile(prefix + ".bin", "<u2")
    np.testing.assert_array_equal(unigram.read_tokens(prefix), expected)
    parts = [unigram.read_tokens(prefix, stop=300), unigram.read_tokens(prefix, first=300)]
    np.testing.assert_array_equal(np.concatenate(parts), expected)
