"""Fine-tuning data: JSON lines of prompt and response, or of chat messages.

| line | what is trained on |
|---|---|
| `{"prompt": TEXT, "response": TEXT}` (or `completion`) | the response |
| `{"messages": [{"role": ROLE, "content": TEXT}, ...]}` | what `assistant` says, of any roles |

Formats (`--sft-tokenizer-prompt-format`): `identity` lays the texts end to end as they are, and the
end-of-document id after each response; `chatml` writes `<|im_start|>ROLE`, a line end, the text,
`<|im_end|>` and a line end. Each text is tokenized on its own, so that the border of what is
trained on is a border of tokens. An end-of-document id closes every conversation. What ends a
response is trained on as well. Where the tokenizer puts an id before whole texts (a BOS), that one
begins each conversation, once and untrained.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from mcore.errors import DataError
from mcore.log import warn_alike

PromptFormat = Literal["identity", "chatml"]
Encode = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]
"""Texts -> (ids of all end to end, number of each): `mcore.tokenizers.encode_segments`."""

_ASSISTANT = "assistant"
_LINES_AT_ONCE = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Conversations:
    """Tokenized conversations of one or more files.

    Attributes:
        ids: all tokens end to end, int32 [tokens].
        trained: which of them are responses, bool [tokens].
        starts: first token of each, and the end, int64 [conversations + 1].
        origin: (file, line) of each.
    """

    ids: np.ndarray
    trained: np.ndarray
    starts: np.ndarray
    origin: list[tuple[str, int]]

    def __len__(self) -> int:
        """The number of conversations."""
        return len(self.origin)


def read_conversations(
    paths: Sequence[str],
    encode: Encode,
    eod_id: int,
    prompt_format: PromptFormat = "identity",
    start_ids: Sequence[int] = (),
) -> Conversations:
    """Read and tokenize whole files.

    Args:
        paths: files of JSON lines.
        encode: the tokenizer on parts of texts; it adds nothing around them.
        eod_id: ends a conversation.
        prompt_format: see the module.
        start_ids: begin a conversation.

    Raises:
        DataError: a file that cannot be read, or a line of another form; it names file and line.
    """
    ids: list[np.ndarray] = []
    trained: list[np.ndarray] = []
    lengths: list[int] = []
    origin: list[tuple[str, int]] = []
    for path in paths:
        for places, conversations in _read(path, prompt_format):
            origin += places
            segments = [segment for conversation in conversations for segment in conversation]
            flat, sizes = encode([text for text, _ in segments])
            ends = np.cumsum(sizes)
            number = 0
            for conversation in conversations:
                rows = [np.array(start_ids, np.int32)]
                marks = [np.zeros(len(start_ids), np.bool_)]
                for _, is_trained in conversation:
                    row = flat[ends[number] - sizes[number] : ends[number]]
                    closes = prompt_format == "identity" and is_trained
                    rows.append(np.append(row, eod_id) if closes else row)
                    marks.append(np.full(len(rows[-1]), is_trained))
                    number += 1
                if prompt_format != "identity" or not conversation[-1][1]:
                    rows.append(np.array([eod_id]))
                    marks.append(np.array([conversation[-1][1]]))
                ids.append(np.concatenate(rows).astype(np.int32))
                trained.append(np.concatenate(marks))
                lengths.append(len(ids[-1]))
    if not lengths:
        raise DataError(f"there is no conversation in {', '.join(paths)}")
    _tell_untrained([bool(marks.any()) for marks in trained], origin)
    return Conversations(
        np.concatenate(ids),
        np.concatenate(trained),
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        origin,
    )


def _tell_untrained(is_trained: Sequence[bool], origin: Sequence[tuple[str, int]]) -> None:
    if all(is_trained):
        return
    path, line = origin[is_trained.index(False)]
    what = f"nothing to train on, for no message is of the role {_ASSISTANT!r}"
    if not any(is_trained):
        raise DataError(
            f"the {len(origin)} conversations (the first: {path}, line {line}) have {what}"
        )
    number = is_trained.count(False)
    warn_alike(
        "%d of %d conversations (the first: %s, line %d) have %s",
        number,
        len(origin),
        path,
        line,
        what,
    )


Segments = list[tuple[str, bool]]


def _read(path: str, prompt_format: PromptFormat) -> Any:
    """Yield ((file, line) of some lines, segments of each)."""
    places: list[tuple[str, int]] = []
    conversations: list[Segments] = []
    try:
        with open(path, encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    conversations.append(_segments(json.loads(line), prompt_format))
                except (ValueError, DataError) as error:
                    raise DataError(f"{path}, line {number}: {error}") from error
                places.append((path, number))
                if len(places) == _LINES_AT_ONCE:
                    yield places, conversations
                    places, conversations = [], []
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}, fine-tuning data (--sft), cannot be read: {error}") from error
    if places:
        yield places, conversations


def _segments(record: Any, prompt_format: PromptFormat) -> Segments:
    """Texts of one conversation, and whether each is trained on."""
    segments: Segments = []
    for role, text in _messages(record):
        if prompt_format == "identity":
            segments.append((text, role == _ASSISTANT))
            continue
        segments.append((f"<|im_start|>{role}\n", False))
        segments.append((f"{text}<|im_end|>\n", role == _ASSISTANT))
    return segments


def _messages(record: Any) -> list[tuple[str, str]]:
    keys = set(record) if isinstance(record, dict) else set()
    response = next((key for key in ("response", "completion") if key in keys), None)
    if "messages" in keys and (twice := sorted(keys & {"prompt", "response", "completion"})):
        raise DataError(f"it has both messages and {' and '.join(twice)}; keep one form")
    if "messages" in keys:
        messages = record["messages"]
    elif "prompt" in keys and response is not None:
        messages = [
            {"role": "user", "content": record["prompt"]},
            {"role": _ASSISTANT, "content": record[response]},
        ]
    else:
        raise DataError("needed are the keys prompt and response, or messages")
    if not isinstance(messages, list) or not messages:
        raise DataError("messages must be a list of at least one message")
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise DataError("a message needs the texts role and content")
    return [(message["role"], message["content"]) for message in messages]
