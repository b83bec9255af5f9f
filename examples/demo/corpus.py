"""A small English corpus from what every CPython installation carries: nothing is downloaded.

The documents are the language reference's help topics (`pydoc_data.topics`) and, one document a
module, the docstrings of the standard library. The same interpreter gives the same two files.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

HELD_OUT_ONE_IN = 20
# Not documentation of the library proper, or not part of every installation.
SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documents() -> Iterator[tuple[str, str]]:
    """Names and texts of all documents, in a fixed order; a docstring appears once."""
    for name in sorted(topics):
        yield f"topic {name}", topics[name]
    library = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py"), key=lambda p: p.relative_to(library).as_posix()):
        relative = path.relative_to(library)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            text = "\n\n\n".join(_docstrings(path, module, seen))
            if text:
                yield f"module {module}", text


def _docstrings(path: Path, module: str, seen: set[str]) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a template, or a file kept broken on purpose
        return
    pending: list[tuple[str, Definition]] = [(module, tree)]
    while pending:
        name, node = pending.pop(0)
        text = ast.get_docstring(node)
        if text and text not in seen:
            seen.add(text)
            yield f"{name}\n\n{text}"
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                pending.append((f"{name}.{child.name}", child))


def is_held_out(name: str) -> bool:
    """Whether a document is for validation; its name alone decides, so nothing shifts."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def write_corpus(train_file: Path, valid_file: Path) -> tuple[int, int]:
    """Write both parts as JSON lines with the key `text`.

    Returns:
        Bytes written to each file.
    """
    with (
        open(train_file, "w", encoding="utf-8") as train,
        open(valid_file, "w", encoding="utf-8") as valid,
    ):
        for name, text in documents():
            line = json.dumps({"name": name, "text": text})
            (valid if is_held_out(name) else train).write(line + "\n")
    return train_file.stat().st_size, valid_file.stat().st_size


def main() -> None:
    """Write train.jsonl and valid.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output-dir", type=Path, required=True)
    folder: Path = parser.parse_args().output_dir
    folder.mkdir(parents=True, exist_ok=True)
    sizes = write_corpus(folder / "train.jsonl", folder / "valid.jsonl")
    print(f"corpus: {sizes[0]} bytes for training, {sizes[1]} bytes held out, in {folder}")


if __name__ == "__main__":
    main()
