"""Files of a tokenizer, carried along with a model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

#: Where a save root keeps them.
FOLDER = "tokenizer"

_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
#: Any of these is a tokenizer.
_WHOLE = ("tokenizer.json", "tokenizer.model")


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the files of a tokenizer; returns their names."""
    names = [name for name in _NAMES if (source / name).is_file()]
    if names:
        target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def tokenizer_options(folder: Path) -> dict[str, Any]:
    """Options that make a run use the tokenizer in a folder; empty where there is none."""
    if not any((folder / name).is_file() for name in _WHOLE):
        return {}
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder.resolve())}
