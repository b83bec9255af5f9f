"""Time and memory of opening a large data set, and how fast samples are fetched.

    python benchmarks/data/open.py --documents 5000000 --epochs 10

Each row is measured in a process of its own and printed as one JSON object. What is timed is what a
training run does: the files opened and checked, the samples ordered, the first one read. Document
lengths are log-normal with a mean of about 600 tokens; the tokens of a large corpus are a sparse
file.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mcore.config.data import DataConfig
from mcore.data import SampleDataset, build_train_valid_test_datasets

EOD = 0
SMALL = 200_000  # documents up to which tokens are written, so that they can be fetched
Order = Literal["megatron", "stable"]
ORDERS: tuple[Order, ...] = ("megatron", "stable")
MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reset_position_ids": {"reset_position_ids": True},
    "reset_attention_mask": {"reset_attention_mask": True},
    "all": {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
}


def make_corpus(prefix: Path, documents: int) -> None:
    generator = np.random.default_rng(documents)
    lengths = np.clip(generator.lognormal(6.0, 0.9, documents), 8, 20_000).astype("<i4")
    ends = np.cumsum(lengths, dtype=np.int64) * 2
    with open(f"{prefix}.idx", "wb") as index:
        index.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        index.write(lengths.tobytes())
        index.write((ends - lengths.astype(np.int64) * 2).tobytes())
        index.write(np.arange(documents + 1, dtype="<i8").tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        if documents > SMALL:
            file.truncate(int(ends[-1]))
            return
        tokens = generator.integers(1, 8192, int(ends[-1]) // 2, dtype=np.uint16)
        tokens[ends // 2 - 1] = EOD
        file.write(tokens.tobytes())


class OwnMemory(threading.Thread):
    """Largest resident memory of this process beyond its start, the pages of mapped files left out.

    Read every few milliseconds, since the system keeps the peak of both together only.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.peak_bytes = self._resident()
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.003):
            self.peak_bytes = max(self.peak_bytes, self._resident())

    def stop(self) -> int:
        self._is_over.set()
        self.join()
        return self.peak_bytes - self.start_bytes

    @staticmethod
    def _resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024


def open_as_training_does(
    prefix: str, samples: int, seq_length: int, order: Order, masks: dict[str, Any]
) -> SampleDataset:
    """The files opened and checked, and the samples ordered."""
    data = DataConfig(data_path=(prefix,), split="100,0,0", data_order=order, **masks)
    dataset, _, _ = build_train_valid_test_datasets(
        data, sizes=(samples, 0, 0), seq_length=seq_length, seed=1234, eod_id=EOD, vocab_size=8192
    )
    assert dataset is not None
    return dataset


def num_samples(prefix: str, seq_length: int, epochs: int) -> int:
    """Samples of so many epochs; from the size of the tokens, so that nothing is opened yet."""
    return (epochs * Path(f"{prefix}.bin").stat().st_size // 2 - 1) // seq_length


def measure(row: str, prefix: str, args: argparse.Namespace) -> dict[str, Any]:
    """From nothing to the first sample, which is when the stable order deals a blend's draws."""
    samples = num_samples(prefix, args.seq_length, args.epochs)
    memory = OwnMemory()
    memory.start()
    start, cpu = time.perf_counter(), time.process_time()
    if row == "numpy shuffles":
        generator = np.random.RandomState(1234)
        documents = np.tile(np.arange(args.documents, dtype=np.int32), args.epochs)
        generator.shuffle(documents)
        generator.shuffle(np.arange(samples, dtype=np.uint32))
    else:
        chosen = next(order for order in ORDERS if row == f"{order} order")
        open_as_training_does(prefix, samples, args.seq_length, chosen, {})[0]
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    megabytes = memory.stop() / 2**20
    return {"row": row, "seconds": round(seconds, 3), "cpu": round(cpu, 3), "MiB": round(megabytes)}


def fetch(prefix: str, seq_length: int, order: Order, masks: str) -> dict[str, Any]:
    samples = num_samples(prefix, seq_length, 1)
    dataset = open_as_training_does(prefix, samples, seq_length, order, MASKS[masks])
    picks = np.random.default_rng(1).integers(0, samples, 4000).tolist()
    dataset[0]  # deals the draws of the stable order
    rates, per_cpu = [], []
    for _ in range(3):
        start, cpu = time.perf_counter(), time.process_time()
        for index in picks:
            dataset[index]
        rates.append(len(picks) / (time.perf_counter() - start))
        per_cpu.append(len(picks) / (time.process_time() - cpu))
    return {
        "row": f"fetch, {order}, {masks}",
        "samples_per_second": round(max(rates)),
        "samples_per_cpu_second": round(max(per_cpu)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=5_000_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--megatron", help="Python that has megatron-core, for its rows.")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--prefix", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.row, args.prefix, args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder, "large"), Path(folder, "small")
        make_corpus(large, args.documents)
        make_corpus(small, min(args.documents, 100_000))
        words = [sys.executable, __file__, "--seq-length", str(args.seq_length)]
        words += ["--epochs", str(args.epochs), "--documents", str(args.documents)]
        words += ["--prefix", str(large)]
        for _ in range(args.repeat):
            for row in ("numpy shuffles", "megatron order", "stable order"):
                subprocess.run([*words, "--row", row], check=True)
            if args.megatron:
                peer(args.megatron, "open", large, args.seq_length, args.epochs)
        for order in ORDERS:
            for masks in MASKS:
                fetched = fetch(str(small), args.seq_length, order, masks)
                print(json.dumps(fetched), flush=True)
        for masks in MASKS if args.megatron else ():
            peer(args.megatron, "fetch", small, args.seq_length, masks)


def peer(python: str, *words: object) -> None:
    program = Path(__file__).with_name("peer_megatron.py")
    subprocess.run([python, str(program), *map(str, words)], check=True)


if __name__ == "__main__":
    main()
