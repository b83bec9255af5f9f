"""Texts into sentences, by NLTK's Punkt model where it is installed and else by one plain rule.

The rule: a sentence ends after `.`, `!` or `?` (or their wide and Indic forms), any closing quotes
and brackets behind it, and white space, if what follows does not begin with a lower-case letter; a
wide mark needs no white space. A full stop does not end a sentence after a single capital letter
(an initial) or a short form of `SHORT_FORMS`. A blank line always ends one. White space between
sentences is dropped unless `keep_newlines`, which leaves what follows a sentence at its end, so
that the sentences together are the text.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from itertools import pairwise

Splitter = Callable[[str], list[str]]

SHORT_FORMS = frozenset(
    {
        *("mr", "mrs", "ms", "dr", "prof", "sr", "jr", "st", "gen", "col", "sgt", "capt", "lt"),
        *("gov", "sen", "rep", "hon", "eds", "inc", "ltd", "co", "corp", "dept", "approx"),
        *("vs", "etc", "e.g", "i.e", "cf", "al", "fig", "figs", "vol", "pp"),
        *("jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec"),
    }
)

_CLOSING = r"[\"'\u00bb\u2019\u201d)\]}\u300d\u300f\uff09]*"
_MARKS = r".!?\u2026\u0964\u0965\u061f"
# A run of marks or of blanks is tried at its start only: a long one would cost its length squared.
_END = re.compile(
    rf"(?:(?<![{_MARKS}])[{_MARKS}]+{_CLOSING}(?=\s)|[\u3002\uff01\uff1f]+{_CLOSING})\s*"
    r"|(?<![^\S\n])[^\S\n]*\n[^\S\n]*\n\s*"
)
_LOOK_BACK = 64
_LAST_WORD = re.compile(r"(\S*?)\.+[^\w\s]*\s*$")


def split_by_rule(text: str, keep_newlines: bool = False) -> list[str]:
    """The sentences of a text, none of them empty; see the module's docstring."""
    sentences: list[str] = []
    start = 0
    for match in _END.finditer(text):
        end = match.end()
        if _goes_on(text[max(start, end - _LOOK_BACK) : end], text[end : end + 1]):
            continue
        sentences.append(text[start:end])
        start = end
    sentences.append(text[start:])
    if not keep_newlines:
        sentences = [sentence.strip() for sentence in sentences]
    return [sentence for sentence in sentences if sentence.strip()]


def _goes_on(last_part: str, following: str) -> bool:
    """What looks like an end is none."""
    if "\n\n" in re.sub(r"[^\S\n]", "", last_part).lstrip("\n"):
        return False
    if following.islower():
        return True
    word = _LAST_WORD.search(last_part)
    if word is None:
        return False
    last = word.group(1).lstrip("\"'([{\u201c\u2018\u00ab")
    return last.lower() in SHORT_FORMS or (len(last) == 1 and last.isupper())


def build_splitter(language: str, keep_newlines: bool) -> tuple[Splitter, str]:
    """The splitter for a language and its name, `punkt LANGUAGE` or `rule`."""
    try:
        tokenize = importlib.import_module("nltk.tokenize")
        punkt = tokenize.PunktTokenizer(language)
    except (ImportError, LookupError, AttributeError):
        return (lambda text: split_by_rule(text, keep_newlines)), "rule"
    if not keep_newlines:
        return punkt.tokenize, f"punkt {language}"
    return (lambda text: _with_gaps(text, punkt)), f"punkt {language}"


def _with_gaps(text: str, punkt: object) -> list[str]:
    """Each sentence with the white space that follows it; blanks alone are none."""
    starts = [start for start, _ in punkt.span_tokenize(text)]  # type: ignore[attr-defined]
    return [text[start:end] for start, end in pairwise([*starts, len(text)])]
