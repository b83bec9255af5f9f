"""The fast core is refused where its library and `tokenizers` would cut texts into other words."""

from pathlib import Path

import pytest

from mcore.errors import UnsupportedError
from mcore.tokenizers.fast_bpe import WORD_PATTERN, FastBytePairs, read_merges
from mcore.tokenizers.gpt2_bpe import GPT2BPETokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "preprocess"


@pytest.fixture(scope="module")
def reference():
    return GPT2BPETokenizer(str(GOLDEN / "vocab.json"), str(GOLDEN / "merges.txt"))._backend


def is_refused(reference, letters, digits):
    """Whether a core is refused whose tables hold these letters and digits."""
    pattern = WORD_PATTERN.replace(r"\p{L}", letters).replace(r"\p{N}", digits)
    try:
        merges = read_merges(str(GOLDEN / "merges.txt"))
        FastBytePairs(reference.get_vocab(), merges, reference, pattern=pattern)
    except UnsupportedError as error:
        return "into other words" in str(error)
    return False


@pytest.mark.parametrize("version", ["12.1", "13.0", "14.0", "15.0", "15.1"])
def test_tables_of_an_earlier_unicode(reference, version):
    """`tokenizers` 0.23 has those of Unicode 16."""
    age = rf"&&\p{{Age={version}}}"
    assert is_refused(reference, rf"[\p{{L}}{age}]", r"\p{N}")
    assert is_refused(reference, r"\p{L}", rf"[\p{{N}}{age}]")


@pytest.mark.parametrize("late", ["\u088f", "\U00011de0"])
def test_a_character_of_unicode_17(reference, late):
    """Either both libraries know it, or neither does: a core of the other kind is refused."""
    letters, digits = r"\p{L}", r"\p{N}"
    if late == "\u088f":
        kinds = [(rf"[{letters}{late}]", digits), (rf"[{letters}--{late}]", digits)]
    else:
        kinds = [(letters, rf"[{digits}{late}]"), (letters, rf"[{digits}--{late}]")]
    assert sorted(is_refused(reference, *kind) for kind in kinds) == [False, True]
