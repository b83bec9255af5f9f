"""Files of a tokenizer, and the ids of its special tokens, carried along with a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore.checkpoint.commit import METADATA_NAME
from mcore.convert.hf_files import CONFIG
from mcore.errors import CheckpointError

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
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
#: Any of these is a tokenizer.
_WHOLE = ("tokenizer.json", "tokenizer.model")


def copy_tokenizer(source: Path | None, target: Path, *, replaces: bool) -> list[str]:
    """Copy the files of a tokenizer; returns their names.

    Args:
        source: folder with the files; None = there are none.
        target: folder to write.
        replaces: what `target` has of another model's tokenizer goes.
    """
    names = [name for name in _NAMES if source is not None and (source / name).is_file()]
    if replaces:
        for name in set(_NAMES).difference(names):
            (target / name).unlink(missing_ok=True)
    for name in names:
        assert source is not None
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return names


def keep_config(config: Path | None, target: Path, *, replaces: bool) -> None:
    """Keep the configuration of an imported model, for what no option of ours says.

    Args:
        config: its config.json; None = it has none.
        target: folder to write.
        replaces: what `target` has of another model goes.
    """
    if config is not None:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(config, target / CONFIG)
    elif replaces:
        (target / CONFIG).unlink(missing_ok=True)


def token_ids(folder: Path) -> dict[str, Any] | None:
    """Ids of special tokens as the kept configuration has them; None where none was kept.

    Raises:
        CheckpointError: it is damaged.
    """
    path = folder / CONFIG
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_bytes())
        return {name: config[name] for name in _TOKEN_IDS if name in config}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def tokenizer_options(source: Path, target: Path) -> dict[str, Any]:
    """Options that make a run use the tokenizer of one folder once it is copied to another.

    Empty where there is none.
    """
    if not any((source / name).is_file() for name in _WHOLE):
        return {}
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(target.resolve())}


def kept_tokenizer(load: Path, options: Mapping[str, Any]) -> Path | None:
    """The tokenizer's folder that a model was trained with, or that an import left beside it.

    Args:
        load: save root, or the directory of one iteration.
        options: of the checkpoint's model.
    """
    root = load.parent if (load / METADATA_NAME).is_file() else load
    places = [root / FOLDER]
    if options.get("tokenizer_type") == "HuggingFaceTokenizer":
        stored = Path(str(options.get("tokenizer_model")))
        places.insert(0, stored.parent if stored.is_file() else stored)
    return next((place for place in places if place.is_dir()), None)
