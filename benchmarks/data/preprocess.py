"""A whole preprocessing run against what its tokenizer library does on the same text and cores.

    python benchmarks/data/preprocess.py --megabytes 64 --workers 1 2
    python benchmarks/data/preprocess.py --megabytes 512 --workers 2 --kinds BPE

Text of invented words with a Zipf distribution; an 8k byte-level BPE and an 8k SentencePiece model
are trained on a part of it. "bare" rows encode the texts, already parsed and in memory, in as many
processes; their ids are dropped. MB are of text; a processor second is one of all processes
together, their start included for whole runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mcore.config.tokenizer import TokenizerConfig
from mcore.tokenizers import build_tokenizer

VOCABULARY = 8192
KINDS = ("BPE", "SentencePiece")


def make_texts(megabytes: float) -> list[str]:
    generator = np.random.default_rng(1)
    syllables = [a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "ar", "en")]
    words = np.array(
        ["".join(generator.choice(syllables, generator.integers(1, 5))) for _ in range(60_000)]
    )
    texts, size = [], 0
    while size < megabytes * 1e6:
        picks = np.minimum(generator.zipf(1.2, 500) - 1, len(words) - 1)
        sentences = words[picks].reshape(-1, 10)
        text = " ".join(
            " ".join(row).capitalize() + ("." if row[0] < "n" else ",\n") for row in sentences
        )
        texts.append(text)
        size += len(text)
    return texts


def train(texts: Sequence[str], folder: Path, kinds: Sequence[str]) -> dict[str, TokenizerConfig]:
    part = texts[: max(1, len(texts) // 8)]
    ways = {"BPE": train_bpe, "SentencePiece": train_sentencepiece}
    return {kind: ways[kind](part, folder) for kind in kinds}


def train_bpe(texts: Sequence[str], folder: Path) -> TokenizerConfig:
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, VOCABULARY, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(folder))
    (folder / "hf").mkdir()
    bpe.save(str(folder / "hf" / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(named))
    return TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )


def train_sentencepiece(texts: Sequence[str], folder: Path) -> TokenizerConfig:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts[:2000] for line in text.splitlines()),
        model_prefix=str(folder / "sp"),
        vocab_size=VOCABULARY,
        model_type="bpe",
        minloglevel=2,
    )
    return TokenizerConfig(
        tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(folder / "sp.model")
    )


def encode_bare(
    way: str, config: TokenizerConfig, texts: list[str], start: object, out: object
) -> None:
    """Encode after the signal; says how long it took, and how much processor time."""
    if way == "tokenizers":
        tokenizer = build_tokenizer(config)

        def encode(part: list[str]) -> object:
            return tokenizer.tokenize_batch(part)

    elif way == "tiktoken":
        core = build_tokenizer(config)._fast_core()._backend  # type: ignore[attr-defined]

        def encode(part: list[str]) -> object:
            return [core.encode_ordinary(text) for text in part]

    else:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=config.tokenizer_model)

        def encode(part: list[str]) -> object:
            return [model.encode_as_ids(text) for text in part]

    start.wait()  # type: ignore[attr-defined]
    begin, cpu = time.perf_counter(), time.process_time()
    for i in range(0, len(texts), 64):
        encode(texts[i : i + 64])
    seconds = time.perf_counter() - begin, time.process_time() - cpu
    out.put(seconds)  # type: ignore[attr-defined]


def bare(way: str, config: TokenizerConfig, texts: list[str], workers: int) -> tuple[float, float]:
    """Seconds of the slowest process, and processor seconds of all."""
    context = multiprocessing.get_context("fork")
    start, out = context.Barrier(workers), context.Queue()
    parts = [texts[i::workers] for i in range(workers)]
    processes = [
        context.Process(target=encode_bare, args=(way, config, part, start, out)) for part in parts
    ]
    for process in processes:
        process.start()
    taken = [out.get() for _ in processes]
    for process in processes:
        process.join()
    return max(wall for wall, _ in taken), sum(cpu for _, cpu in taken)


def whole_run(
    config: TokenizerConfig, corpus: Path, folder: Path, workers: int
) -> tuple[float, float]:
    """Seconds, and processor seconds of all processes."""
    words = ["--input", corpus, "--output-prefix", folder / "out", "--workers", workers]
    words += ["--append-eod", "--log-interval", 0, "--tokenizer-type", config.tokenizer_type]
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        value = getattr(config, name)
        if value is not None:
            words += ["--" + name.replace("_", "-"), value]
    begin, cpu = time.perf_counter(), children_cpu()
    subprocess.run(
        [sys.executable, "-m", "tools.preprocess_data", *map(str, words)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - begin, children_cpu() - cpu


def children_cpu() -> float:
    """Processor seconds of the processes that this one has waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--megatron", help="Python that has megatron-core, for its row.")
    args = parser.parse_args()
    texts = make_texts(args.megabytes)
    size = sum(map(len, texts)) / 1e6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        configs = train(texts, folder, args.kinds)
        corpus = folder / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        ways = [("BPE", "tiktoken"), ("BPE", "tokenizers"), ("SentencePiece", "sentencepiece")]
        for workers in args.workers:
            for _ in range(args.repeat):
                for kind, way in (each for each in ways if each[0] in args.kinds):
                    show(f"bare {way}", workers, size, bare(way, configs[kind], texts, workers))
                    if way != "tokenizers":
                        taken = whole_run(configs[kind], corpus, folder, workers)
                        show(f"whole run, {kind}", workers, size, taken)
                if args.megatron and workers == 1 and "BPE" in args.kinds:
                    files = [corpus, folder / "peer", folder / "hf"]
                    program = Path(__file__).with_name("peer_megatron.py")
                    words = [args.megatron, program, "preprocess", *files]
                    subprocess.run([str(word) for word in words], check=True)


def show(row: str, workers: int, megabytes: float, taken: tuple[float, float]) -> None:
    wall, cpu = (round(megabytes / seconds, 2) for seconds in taken)
    rates = {"MB_per_second": wall, "MB_per_cpu_second": cpu}
    print(json.dumps({"row": row, "workers": workers, **rates}), flush=True)


if __name__ == "__main__":
    main()
