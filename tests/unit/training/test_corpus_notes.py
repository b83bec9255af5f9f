"""What the notes beside corpora (`PREFIX.meta.json`) do when training starts."""

from pathlib import Path

import pytest

from mcore.cli import data_show
from mcore.config.tokenizer import TokenizerConfig
from mcore.errors import DataError
from mcore.tokenizers import build_tokenizer
from mcore.training import gpt
from mcore.training.arguments import build_config, parse
from tests.equivalence.program import train
from tests.equivalence.tiny import command
from tests.unit.tools.test_preprocess_data import write_lines
from tools.preprocess_data import main

GOLDEN = Path(__file__).parents[2] / "golden" / "preprocess"
BPE = f"GPT2BPETokenizer --vocab-file {GOLDEN}/vocab.json --merge-file {GOLDEN}/merges.txt"
BYTES = "ByteLevelTokenizer"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Prefixes of three corpora of bytes, the last one without marks of ends."""
    folder = tmp_path_factory.mktemp("notes")
    source = write_lines(folder / "in.jsonl", *["a short text"] * 20)
    prefixes = []
    for name, more in (("a", ["--append-eod"]), ("b", ["--append-eod"]), ("open", [])):
        words = ["--input", str(source), "--output-prefix", str(folder / name), "--workers", "1"]
        assert main([*words, "--tokenizer-type", BYTES, *more]) == 0
        prefixes.append(f"{folder / name}_text_document")
    return prefixes


def words_of(prefixes, tokenizer, *more):
    words = command("DATA", 2, *more)
    for flag in ("--tokenizer-type", "--vocab-size", "--null-tokenizer-eod-id"):
        at = words.index(flag)
        del words[at : at + 2]
    at = words.index("DATA")
    words[at : at + 1] = prefixes
    return [*words, "--tokenizer-type", *tokenizer.split()]


@pytest.mark.parametrize("other", [BPE, "NullTokenizer --vocab-size 101"], ids=["bpe", "null"])
def test_training_refuses_the_corpus_of_another_tokenizer(corpora, other):
    with pytest.raises(DataError, match=f"{corpora[0]} was made with another tokenizer"):
        train(words_of(corpora[:1], other))
    assert len(train(words_of(corpora[:1], BYTES))) == 2


def test_the_vocabulary_is_looked_at_once(corpora, monkeypatch):
    """However many corpora there are: with a large vocabulary it takes a third of a second."""
    asked = []
    for module in (gpt, data_show):
        real = module.fingerprint
        monkeypatch.setattr(
            module, "fingerprint", lambda it, real=real: asked.append(it) or real(it)
        )
    config = build_config(parse(words_of(corpora, BYTES)))
    assert gpt.datasets_provider(config, (8, 0, 0))[0] is not None
    assert len(asked) == 1
    identity = data_show.tokenizer_identity(
        build_tokenizer(TokenizerConfig(tokenizer_type=BYTES)), config.tokenizer
    )
    assert identity.fingerprint() == identity.fingerprint()
    assert len(asked) == 2


def test_masks_that_find_no_end_are_told(corpora, caplog):
    masks = "--reset-attention-mask"  # beside --eod-mask-loss
    for prefix in (corpora[0], corpora[2]):
        config = build_config(parse(words_of([prefix], BYTES, masks)))
        gpt.datasets_provider(config, (8, 0, 0))
    told = [record.getMessage() for record in caplog.records if "marks where" in record.message]
    assert len(told) == 1
    assert f"nothing in {corpora[2]} marks where a document ends" in told[0]
    assert "--reset-attention-mask and --eod-mask-loss can do nothing" in told[0]
