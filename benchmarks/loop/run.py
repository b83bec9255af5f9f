"""What the training loop costs: a step of pretrain_gpt.py over a bare step of the same model.

python benchmarks/loop/run.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from mcore.data import IndexedDatasetBuilder

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
VOCABULARY = 8192
WARMUP = 3


def command(steps: int, corpus: str) -> list[str]:
    words = (
        f"--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 "
        f"--micro-batch-size 4 --global-batch-size 8 --train-iters {steps} --lr 1e-4 "
        f"--clip-grad 0 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --log-interval 1 "
        f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --split 100,0,0 --device cpu"
    )
    return [*words.split(), "--data-path", corpus]


def write_corpus(prefix: Path) -> str:
    generator = np.random.default_rng(0)
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for _ in range(200):
            builder.add_item(generator.integers(0, VOCABULARY - 1, 1000).tolist())
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def seconds_of(words: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words], check=True, env=environment, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="timed steps a row and round")
    options = parser.parse_args()
    loop, bare, ratios = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        words = command(WARMUP + options.steps, write_corpus(Path(folder, "text")))
        for turn in range(options.rounds):
            records, plain = Path(folder, f"{turn}.jsonl"), Path(folder, f"{turn}.json")
            board = ["--tensorboard-dir", str(Path(folder, "board"))]
            files = ["--metrics-jsonl", str(records), *board]
            rows = [
                [str(ROOT / "pretrain_gpt.py"), *words, *files],
                [str(HERE / "bare.py"), str(plain), *words],
            ]
            for row in rows if turn % 2 else reversed(rows):  # machines drift
                seconds_of(row)
            lines = [json.loads(line) for line in records.read_text().splitlines()]
            loop.append([line["seconds"] for line in lines][WARMUP:])
            bare.append(json.loads(plain.read_text())[WARMUP:])
            ratios.append(statistics.median(loop[-1]) / statistics.median(bare[-1]))
            print(f"round {turn + 1}: ratio of medians {ratios[-1]:.3f}", flush=True)
    for name, of in (("median", statistics.median), ("best", min)):
        ours, theirs = (1000 * of(itertools.chain(*rounds)) for rounds in (loop, bare))
        print(f"{name}: loop {ours:.1f} ms, bare {theirs:.1f} ms, ratio {ours / theirs:.3f}")
    print(f"median of the rounds' ratios: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
