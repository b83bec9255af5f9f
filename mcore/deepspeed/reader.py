"""Read a DeepSpeed configuration: a JSON file, with comments allowed, or base64 of its text."""

from __future__ import annotations

import base64
import binascii
import json
import re
from pathlib import Path
from typing import Any

from mcore.errors import ConfigError

# A string is matched first, so that nothing in it is taken for a comment.
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)


def read_config(path: str) -> dict[str, Any]:
    """The configuration in a file, or in the word itself where it is URL-safe base64 of JSON.

    Raises:
        ConfigError: no such file, not JSON (with line and column), or a key that stands twice.
    """
    text = _text(path)
    bare = _STRING_OR_COMMENT.sub(_blank, text)
    try:
        config = json.loads(bare, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--deepspeed_config {path} is no JSON: {error.msg} in line {error.lineno}, column "
            f"{error.colno}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--deepspeed_config {path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--deepspeed_config {path} must hold one JSON object")
    return config


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        try:
            return base64.b64decode(path, altchars=b"-_", validate=True).decode()
        except (binascii.Error, UnicodeError, ValueError):
            raise ConfigError(f"--deepspeed_config {path} cannot be read: {error}") from error


def _blank(match: re.Match[str]) -> str:
    """Spaces for a comment, with its line breaks, so that errors name the right place."""
    return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"the key {key!r} stands twice")
        found[key] = value
    return found
