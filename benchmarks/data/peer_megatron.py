"""Megatron-Core's rows of the data benchmarks, run by an interpreter that has megatron-core.

    PYTHON benchmarks/data/peer_megatron.py preprocess CORPUS.jsonl OUT TOKENIZER_FOLDER
    PYTHON benchmarks/data/peer_megatron.py open PREFIX SEQUENCE EPOCHS
    PYTHON benchmarks/data/peer_megatron.py fetch PREFIX SEQUENCE MASKS

`preprocess` does what one worker and the writer of Megatron-LM's tools/preprocess_data.py do, with
Megatron-Core's tokenizer and builder, in one process and without its imports' 13 seconds. Each
command prints one JSON object. `open.py` and `preprocess.py` start them with --megatron PYTHON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from typing import Any

import numpy as np

SHOWN: dict[str, tuple[str, ...]] = {
    "plain": (),
    "reset_position_ids": ("reset_position_ids",),
    "reset_attention_mask": ("reset_attention_mask",),
    "all": ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
}


def preprocess(corpus: str, out: str, tokenizer_folder: str) -> dict[str, Any]:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    options = [
        "special_tokens",
        "tokenizer_hf_no_use_fast",
        "tokenizer_hf_no_include_special_tokens",
        "trust_remote_code",
        "metadata_path",
        "pad_vocab_size",
        "chat_template",
        "vocab_file",
        "merge_file",
    ]
    chosen = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": tokenizer_folder}
    tokenizer = build_tokenizer(argparse.Namespace(**{**dict.fromkeys(options), **chosen}))
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(f"{out}.bin", dtype=dtype)
    start, cpu = time.perf_counter(), time.process_time()
    size = 0
    with open(corpus, encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            ids = [*tokenizer.tokenize(text), tokenizer.eod]
            builder.add_document(ids, [len(ids)])
            size += len(text)
    builder.finalize(f"{out}.idx")
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "row": "Megatron-Core, one worker",
        "MB_per_second": round(size / 1e6 / seconds, 2),
        "MB_per_cpu_second": round(size / 1e6 / cpu, 2),
    }


def data_set(prefix: str, seq_length: int, epochs: int, masks: str) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        vocab_size, eod, pad = 8192, 0, 8191
        unique_identifiers = {"class": "benchmark"}

    chosen = SHOWN[masks]
    low = IndexedDataset(prefix, mmap=True)
    documents = np.arange(low.sequence_lengths.shape[0], dtype=np.int32)
    tokens = int(np.sum(low.sequence_lengths, dtype=np.int64))
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=seq_length,
        tokenizer=Tokenizer(),
        path_to_cache=tempfile.mkdtemp(),
        split="100,0,0",
        blend=([prefix], None),
        reset_position_ids="reset_position_ids" in chosen,
        reset_attention_mask="reset_attention_mask" in chosen,
        eod_mask_loss="eod_mask_loss" in chosen,
        create_attention_mask="reset_attention_mask" in chosen,
    )
    samples = (epochs * tokens - 1) // seq_length
    return GPTDataset(low, prefix, documents, samples, Split.train, config)


def opening(prefix: str, seq_length: int, epochs: int) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    data_set(prefix, seq_length, epochs, "plain")
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"row": "Megatron-Core, index built", "seconds": round(seconds, 3), "cpu": round(cpu, 3)}


def fetch(prefix: str, seq_length: int, masks: str) -> dict[str, Any]:
    dataset = data_set(prefix, seq_length, 1, masks)
    number = 100 if "reset_attention_mask" in SHOWN[masks] else 4000
    picks = np.random.default_rng(1).integers(0, len(dataset), number).tolist()
    rates, per_cpu = [], []
    for _ in range(3):
        start, cpu = time.perf_counter(), time.process_time()
        for index in picks:
            dataset[index]
        rates.append(number / (time.perf_counter() - start))
        per_cpu.append(number / (time.process_time() - cpu))
    return {
        "row": f"fetch, Megatron-Core, {masks}",
        "samples_per_second": round(max(rates)),
        "samples_per_cpu_second": round(max(per_cpu)),
    }


def main(words: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    what, *rest = words
    if what == "preprocess":
        print(json.dumps(preprocess(*rest)))
    elif what == "open":
        print(json.dumps(opening(rest[0], int(rest[1]), int(rest[2]))))
    else:
        print(json.dumps(fetch(rest[0], int(rest[1]), rest[2])))


if __name__ == "__main__":
    main(sys.argv[1:])
