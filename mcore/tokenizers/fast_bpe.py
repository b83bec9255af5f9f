"""Byte-level BPE on tiktoken's core: the same ids as `tokenizers`, several times faster.

tiktoken merges any two neighbours whose bytes together are a token; `tokenizers` merges the pairs
that merges.txt lists. The two agree on every text where (1) each line of merges.txt makes a token
that no other line makes, and (2) merging the bytes of each token by the listed pairs ends in that
token. For then two neighbours that make up a token T can only be the pair that T is listed with:
no merge has crossed their outer ends, so what happened between them is what happens to the bytes of
T alone, and that passes through just one state of two tokens. Both are checked for every token.
That they cut texts into the same words is checked on texts with characters of every kind, those of
late versions of Unicode among them: each library has tables of its own.

(Vocabularies that were turned from tiktoken's own ranks into merges list several pairs for one
token. They fail (1), and stay with `tokenizers`: between two overlapping pairs of one token the two
libraries need not choose alike.)
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from mcore.errors import DataError, UnsupportedError
from mcore.log import get_logger
from mcore.tokenizers.base import EncodedTexts, lay_end_to_end

# GPT-2's words: contractions, letters, digits, other marks, each with a space before, and spaces.
WORD_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_SPACES = r"\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD, _MARKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
# As they stand in tokenizer.json: Llama 3 cuts numbers into three digits, Qwen 2 into single ones.
KNOWN_PATTERNS = tuple(
    f"{_ENDINGS}|{_WORD}|{digits}|{_MARKS}|{_SPACES}" for digits in (r"\p{N}{1,3}", r"\p{N}")
)

# tiktoken's matcher runs out of stack on some 200,000 blanks in a row; such texts go the other way.
_MANY = 50_000
_MANY_BLANKS = re.compile(rf"\s{{{_MANY}}}")

# The way to arrays looks for special tokens first, and without any it stops at each character. This
# one of two noncharacters is never allowed, so that a text that holds it is read as any other.
_NO_TOKEN = "\U0010fffe\U0010ffff"

_PROBES = (
    "I'll say it's they're we've I'd don't I'm 'S 'LL ''s",
    "tabs\t\tand  two   three    spaces \n\n  \r\n end ",
    "1234567890 3.14 1,000,000 x2y3 \u0661\u0662\u0663 \u00bd\u00b2 \u2167 \u3007",
    "na\u00efve ol\u00e9 e\u0301 \u00df \u0130i \u01c5 \ufb03 \u1e9e",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \uc548\ub155",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \U0001d49c",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9 \u2764\ufe0f #\ufe0f\u20e3 \U000e0067",
    "\u00a0\u1680\u2003\u2028\u2029\u202f\u205f\u3000\u0085\u200b\ufeff\x00\x1c\x1f\x7f",
    "for(i=0;i<n;++i){a[i]*=-1;} // $%&@~^|\\ <|endoftext|> http://a.b/c?d=e#f",
    "HE'LL I'D 'Re '\u017f we'VE'\u212a can't12345x\u00b2 (a)[b]\n\n\t{c}\r\n \u00e9t\u00e9",
    "aaaaaaaaaaaaaaaa bbbbbbb ababababab !!!!!!!! ........ ------ ====",
    f"a {_NO_TOKEN}b {_NO_TOKEN}",
)


# A letter and a digit of each version of Unicode from 13 to 17 (of 15.1 a letter). Words show what
# a library takes them for: what is neither goes with the mark behind it.
_LATE_LETTERS = "\u08be\u0870\U00011f04\U0002ebf0\u1c89\u088f"
_LATE_DIGITS = "\U00011950\U00016ac0\U00011f50\U00010d40\U00011de0"
_CUT_PROBES = (
    *_PROBES,
    *(f"a{letter}!" for letter in _LATE_LETTERS),
    *(f"1{digit}!" for digit in _LATE_DIGITS),
)


class FastBytePairs:
    """Encodes texts with tiktoken's core.

    Args:
        vocab: token, spelled in GPT-2's printable characters, to id.
        merges: the pairs in order of rank.
        reference: tokenizer of the `tokenizers` library that decides what is right.
        pattern: what cuts texts into words.
        marks: texts of special tokens that `reference` finds in a text; such texts go its way.
        normal_form: what `reference` turns texts into first; texts of another form go its way too.

    Raises:
        UnsupportedError: the vocabulary is one on which the two libraries could differ.
    """

    def __init__(
        self,
        vocab: Mapping[str, int],
        merges: Sequence[tuple[str, str]],
        reference: Any,
        *,
        pattern: str = WORD_PATTERN,
        marks: Sequence[str] = (),
        normal_form: Literal["NFC"] | None = None,
    ) -> None:
        import tiktoken

        _check_words(pattern, reference)
        tokens = _tokens_by_rank(vocab, merges)
        _check_each_token(vocab, merges, tokens)
        spelled = bytes_by_character()
        self._ids = np.array([vocab[token] for token in tokens], np.int32)
        self._marks = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._normal_form = normal_form
        self._backend = tiktoken.Encoding(
            name="byte pairs",
            pat_str=pattern,
            mergeable_ranks={
                bytes(spelled[c] for c in token): rank for rank, token in enumerate(tokens)
            },
            special_tokens={_NO_TOKEN: len(tokens)},
        )
        for text in _PROBES:
            ids = self.encode(text)
            bare = reference.encode(text, add_special_tokens=False).ids
            if ids is not None and ids.tolist() != bare:
                raise UnsupportedError(f"tiktoken's core reads {text!r} otherwise")

    def encode(self, text: str) -> np.ndarray | None:
        """Token ids of a text, int32; None where this core cannot read it."""
        if len(text) >= _MANY and _MANY_BLANKS.search(text):
            return None
        if self._marks is not None and self._marks.search(text):
            return None
        if self._normal_form is not None and not unicodedata.is_normalized(self._normal_form, text):
            return None
        try:
            return self._ids.take(self._backend.encode_to_numpy(text, disallowed_special=()))
        except UnicodeEncodeError:  # half a surrogate pair, which the way to lists mends
            return self._ids[np.array(self._backend.encode_ordinary(text), np.int32)]


def read_merges(path: str) -> list[tuple[str, str]]:
    """The pairs of a merges.txt in order.

    Raises:
        DataError: a line that is not two words.
    """
    pairs: list[tuple[str, str]] = []
    with open(path, encoding="utf-8", newline="\n") as stream:
        for number, line in enumerate(stream, 1):
            words = line.rstrip("\r\n").split(" ")
            if line.startswith("#version") or words == [""]:
                continue
            if len(words) != 2:
                raise DataError(f"{path}, line {number}: a merge is two tokens, got {line!r}")
            pairs.append((words[0], words[1]))
    return pairs


def bytes_by_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    spelled.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return spelled


def _tokens_by_rank(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> list[str]:
    """The 256 bytes, then what each merge makes."""
    spelled = bytes_by_character()
    tokens = [*spelled, *(first + second for first, second in merges)]
    absent = next((token for token in tokens if token not in vocab), None)
    if absent is not None:
        raise UnsupportedError(f"the vocabulary lacks {absent!r}")
    if len(set(tokens)) < len(tokens):
        raise UnsupportedError("two merges make the same token")
    strange = next((token for token in tokens if not set(token) <= set(spelled)), None)
    if strange is not None:
        raise UnsupportedError(f"{strange!r} is not spelled in GPT-2's characters for bytes")
    return tokens


def _check_words(pattern: str, reference: Any) -> None:
    """Compare the words themselves; other words can be the same ids in one vocabulary by chance."""
    import tiktoken

    # A core in which every part of the texts is a token shows each word as one.
    parts = {
        text[start:stop].encode()
        for text in _CUT_PROBES
        for start in range(len(text))
        for stop in range(start + 1, len(text) + 1)
    }
    ranks = {part: rank for rank, part in enumerate(parts)}
    core = tiktoken.Encoding("words", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    spelled = bytes_by_character()
    for text in _CUT_PROBES:
        words = [core.decode_single_token_bytes(token) for token in core.encode_ordinary(text)]
        pieces = [piece for piece, _ in reference.pre_tokenizer.pre_tokenize_str(text)]
        if words != [bytes(spelled[c] for c in piece) for piece in pieces]:
            raise UnsupportedError(f"tiktoken's core cuts {text!r} into other words")


def _check_each_token(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], tokens: Sequence[str]
) -> None:
    from tokenizers import Tokenizer, models

    merging_alone = Tokenizer(models.BPE(dict(vocab), list(merges)))
    for token, encoding in zip(tokens, merging_alone.encode_batch_fast(list(tokens)), strict=True):
        if encoding.ids != [vocab[token]]:
            raise UnsupportedError(f"the merges do not lead to {token!r}")


class WithFastCore(ABC):
    """A tokenizer that encodes many texts by the fastest library which gives the same ids."""

    _fast: FastBytePairs | None = None
    _fast_is_tried = False

    @abstractmethod
    def _build_fast_core(self) -> FastBytePairs | None:
        """The fast way, or None where it is out of the question.

        Raises:
            UnsupportedError: it looks possible, but could give other ids.
        """

    @abstractmethod
    def _files(self) -> str:
        """What the tokenizer was read from, for messages."""

    @abstractmethod
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, in order."""

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Token ids of many texts as arrays."""
        fast = self._fast_core()
        if fast is None:
            return lay_end_to_end(self.tokenize_batch(texts))
        rows: list[np.ndarray | list[int]] = []
        for text in texts:
            ids = fast.encode(text)
            rows.append(self.tokenize_batch([text])[0] if ids is None else self._dressed(ids))
        return lay_end_to_end(rows)

    def _dressed(self, ids: np.ndarray) -> np.ndarray:
        """The ids of a text with what the tokenizer puts around them."""
        return ids

    def _fast_core(self) -> FastBytePairs | None:
        if not self._fast_is_tried:
            self._fast_is_tried = True
            try:
                self._fast = self._build_fast_core()
            except (UnsupportedError, DataError) as error:
                get_logger().warning(
                    "%s: tokenizing the slower way, since %s", self._files(), error
                )
        return self._fast
