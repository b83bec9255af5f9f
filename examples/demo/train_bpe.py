"""Train GPT-2's kind of byte-level BPE on JSON lines: vocab.json and merges.txt."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048


def read_texts(jsonl_file: Path) -> Iterator[str]:
    """The `text` of every line."""
    with open(jsonl_file, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def train_bpe(
    jsonl_file: Path, output_dir: Path, vocab_size: int = VOCAB_SIZE
) -> tuple[Path, Path]:
    """Learn merges until the vocabulary, `<|endoftext|>` (id 0) included, has `vocab_size` tokens.

    Returns:
        vocab.json and merges.txt.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_texts(jsonl_file), trainer)
    output_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.model.save(str(output_dir))
    return output_dir / "vocab.json", output_dir / "merges.txt"


def main() -> None:
    """Train on one file and write both files to a folder."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", type=Path, required=True, help="JSON lines with the key text")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    arguments = parser.parse_args()
    files = train_bpe(arguments.input, arguments.output_dir, arguments.vocab_size)
    print(f"tokenizer: {files[0]}, {files[1]}")


if __name__ == "__main__":
    main()
