"""The fast way for a byte-level BPE that is stored as a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore.errors import UnsupportedError
from mcore.tokenizers.fast_bpe import KNOWN_PATTERNS, WORD_PATTERN, FastBytePairs


def fast_core_of_json(content: Mapping[str, Any], reference: Any) -> FastBytePairs | None:
    """The fast core with the vocabulary of a tokenizer.json; None where it is no byte-level BPE.

    Args:
        content: of the file.
        reference: the tokenizer that the `tokenizers` library makes of it.

    Raises:
        UnsupportedError: the file asks for something on which the two libraries could differ.
    """
    model, steps = content["model"], _steps(content.get("pre_tokenizer"))
    if model.get("type") != "BPE" or not any(step["type"] == "ByteLevel" for step in steps):
        return None
    normalizer = content.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):
        raise UnsupportedError(f"its text is changed first ({normalizer['type']})")
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    chosen = next((name for name in options if model.get(name)), None)
    if chosen is not None:
        raise UnsupportedError(f"its model has {chosen} {model[chosen]!r}")
    marks = [token["content"] for token in content.get("added_tokens", ())]
    merges = [_pair(merge) for merge in model["merges"]]
    made = {first + second for first, second in merges}
    stray = next(
        (t for t in model["vocab"] if len(t) > 1 and t not in made and t not in marks), None
    )
    if model.get("ignore_merges") and stray is not None:
        raise UnsupportedError(f"whole words such as {stray!r} are taken without merges")
    return FastBytePairs(
        model["vocab"],
        merges,
        reference,
        pattern=_pattern(steps),
        marks=marks,
        normal_form=None if normalizer is None else "NFC",
    )


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    """A merge, which older files spell as one text."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return ()
    if pre_tokenizer["type"] == "Sequence":
        steps: Sequence[Mapping[str, Any]] = pre_tokenizer["pretokenizers"]
        return steps
    return (pre_tokenizer,)


def _pattern(steps: Sequence[Mapping[str, Any]]) -> str:
    """What cuts a text into words, where it is one of the patterns that both libraries know."""
    *cuts, last = steps
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        raise UnsupportedError("it puts a blank before each text, or cuts after turning to bytes")
    # Files that are older than the option mean True.
    if not cuts and last.get("use_regex", True):
        return WORD_PATTERN
    if len(cuts) == 1 and cuts[0]["type"] == "Split" and not last.get("use_regex", True):
        cut = cuts[0]
        pattern: str = cut["pattern"].get("Regex", "")
        if pattern in KNOWN_PATTERNS and cut["behavior"] == "Isolated" and not cut["invert"]:
            return pattern
    raise UnsupportedError("it cuts texts into words by a rule of its own")
