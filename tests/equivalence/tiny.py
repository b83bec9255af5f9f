"""A model and a corpus small enough for dozens of runs, with odd sizes where sizes are cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mcore.data import IndexedDatasetBuilder

VOCABULARY = 101
SEQUENCE = 16
BATCH = 4
EOD = 0


def write_corpus(prefix: Path, documents: int = 120) -> str:
    """Documents that count upwards from a random token, each with an end-of-document token."""
    generator = np.random.default_rng(7)
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for _ in range(documents):
            start, length = generator.integers(0, VOCABULARY - 1), generator.integers(5, 40)
            tokens = 1 + (start + np.arange(length)) % (VOCABULARY - 1)
            builder.add_item([*tokens.tolist(), EOD])
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def command(corpus: str, iterations: int, *more: str, micro: int = 1) -> list[str]:
    """A command line of four layers; later words win, so `more` can change it."""
    words = (
        f"--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length {SEQUENCE} "
        f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --null-tokenizer-eod-id {EOD} "
        f"--make-vocab-size-divisible-by 1 --split 80,20,0 --eval-iters 0 --eod-mask-loss "
        f"--micro-batch-size {micro} --global-batch-size {BATCH} --train-iters {iterations} "
        "--lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 1 --clip-grad 0.5 "
        "--weight-decay 0.1 --adam-beta2 0.95 --num-workers 0 --init-method-std 0.1"
    )
    return [*words.split(), "--data-path", corpus, *" ".join(more).split()]
