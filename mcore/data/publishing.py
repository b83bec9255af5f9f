"""How files that are complete under temporary names get their own."""

from __future__ import annotations

import contextlib
import os


def publish(bin_path: str, idx_path: str, *, note_path: str | None = None) -> None:
    """Give sealed files their names; what an earlier, interrupted call has done stays done.

    An index never describes other tokens, and what is known about a corpus lies beside it before
    the index is there: a reader sees the old corpus, none, or the new one whole.

    Args:
        bin_path: the `.bin` file to be; an existing one is replaced.
        idx_path: the `.idx` file to be.
        note_path: a file that belongs to the two and waits beside them under its `partial_path`.
    """
    if os.path.exists(partial_path(idx_path)):
        with contextlib.suppress(FileNotFoundError):
            os.remove(idx_path)
        for path in filter(None, (bin_path, note_path, idx_path)):
            if os.path.exists(partial_path(path)):
                os.replace(partial_path(path), path)
    for path in helper_paths(bin_path):
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


def partial_path(path: str) -> str:
    """The temporary name of a file that is not complete."""
    return path + ".partial"


def helper_paths(bin_path: str) -> list[str]:
    """Temporary files beside the tokens: sequence lengths, document ends."""
    return [partial_path(bin_path + kind) for kind in (".lengths", ".documents")]
