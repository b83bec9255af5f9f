"""The demo: from text to a trained, stopped, resumed, evaluated and generating GPT.

    make demo

It trains on 4 processes (tensor parallel 2 x pipeline parallel 2, sequence parallelism), stops
half-way and resumes on 2 processes (data parallel 2) from the same checkpoint, and fails unless the
numbers are those of the run that never stopped. Everything it runs is printed to be copied;
everything it makes is in demo-output/.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from examples.demo.train_bpe import VOCAB_SIZE
from examples.demo.unigram import read_tokens, unigram_perplexity

OUTPUT = Path("demo-output")
CORPUS, TOKENIZER, DATA = OUTPUT / "corpus", OUTPUT / "tokenizer", OUTPUT / "data"
STRAIGHT, RESUMED = OUTPUT / "straight", OUTPUT / "resumed"
STRAIGHT_RECORDS, RESUMED_RECORDS = OUTPUT / "straight.jsonl", OUTPUT / "resumed.jsonl"

SPLITS = ("train", "valid")
ITERATIONS, STOP, RESUMED_UNTIL = 240, 120, 130
MAX_LOSS_DIFFERENCE = 1e-5
MAX_SHARE_OF_UNIGRAM = 0.5

TOKENIZER_FLAGS = (
    *("--tokenizer-type", "GPT2BPETokenizer"),
    *("--vocab-file", TOKENIZER / "vocab.json", "--merge-file", TOKENIZER / "merges.txt"),
)
TRAINING_FLAGS = (
    *("--num-layers", 4, "--hidden-size", 128, "--num-attention-heads", 4),
    *("--seq-length", 128, "--hidden-dropout", 0, "--attention-dropout", 0),
    *("--micro-batch-size", 4, "--global-batch-size", 16, "--train-iters", ITERATIONS),
    *("--lr", 3e-3, "--min-lr", 3e-4, "--lr-decay-style", "cosine", "--lr-warmup-iters", 20),
    *("--weight-decay", 0.1, "--adam-beta2", 0.95, "--seed", 1234),
    *("--train-data-path", DATA / "train_text_document"),
    *("--valid-data-path", DATA / "valid_text_document"),
    *("--eval-interval", ITERATIONS, "--eval-iters", 20, "--log-interval", 10),
    *("--save-interval", STOP),
    *TOKENIZER_FLAGS,
)
TP2_PP2 = (
    *("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2),
    "--sequence-parallel",
)


def main() -> None:
    """Run every step; the exit status says whether all requirements hold."""
    begin = time.monotonic()
    for old in (CORPUS, TOKENIZER, DATA, STRAIGHT, RESUMED):
        shutil.rmtree(old, ignore_errors=True)
    for old in (STRAIGHT_RECORDS, RESUMED_RECORDS):
        old.unlink(missing_ok=True)

    prepare_data()
    _title("3", f"train {ITERATIONS} iterations on 4 processes: TP 2 x PP 2, sequence parallel")
    train(4, *TP2_PP2, "--save", STRAIGHT, "--metrics-jsonl", STRAIGHT_RECORDS)
    _title("4", f"resume at iteration {STOP} on 2 processes: DP 2")
    resume = ("--load", STRAIGHT, "--ckpt-step", STOP, "--exit-interval", RESUMED_UNTIL)
    train(2, *resume, "--save", RESUMED, "--metrics-jsonl", RESUMED_RECORDS)
    _title("5", "is it the same run, and has the model learned anything?")
    check_resume(read_records(STRAIGHT_RECORDS), read_records(RESUMED_RECORDS))
    check_perplexity(read_records(STRAIGHT_RECORDS))
    _title("6", "what the model writes")
    generate = (_program("mcore"), "generate", "--load", STRAIGHT, "--prompt", "Return the")
    _run(*generate, "--max-new-tokens", 80, "--temperature", 0.7, "--top-k", 40, "--seed", 1)

    print(f"\nLoss curves: {_program('tensorboard')} --logdir {STRAIGHT / 'tensorboard'}")
    print(f"Demo passed in {time.monotonic() - begin:.0f} s.")


def prepare_data() -> None:
    """Corpus, vocabulary, token files."""
    _title("1", "a corpus from Python's own documentation, a vocabulary from the corpus")
    _run(_program("python"), "-m", "examples.demo.corpus", "--output-dir", CORPUS)
    bpe = ("-m", "examples.demo.train_bpe", "--input", CORPUS / "train.jsonl")
    _run(_program("python"), *bpe, "--output-dir", TOKENIZER)
    _title("2", "text to token files")
    for split in SPLITS:
        files = ("--input", CORPUS / f"{split}.jsonl", "--output-prefix", DATA / split)
        tool = (_program("python"), "tools/preprocess_data.py")
        _run(*tool, *files, *TOKENIZER_FLAGS, "--append-eod")


def train(processes: int, *flags: str | int | Path) -> None:
    """Start pretrain_gpt.py; one computing thread a process, since there are more than cores."""
    launcher = ("env", "OMP_NUM_THREADS=1", _program("torchrun"), "--standalone")
    _run(*launcher, "--nproc-per-node", processes, "pretrain_gpt.py", *TRAINING_FLAGS, *flags)


def read_records(path: Path) -> list[dict[str, Any]]:
    """What a run wrote with --metrics-jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_resume(straight: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    """Fail unless the resumed run's losses are those of the straight run."""
    wanted = {r["iteration"]: r["lm_loss"] for r in straight if "lm_loss" in r}
    found = {r["iteration"]: r["lm_loss"] for r in resumed if "lm_loss" in r}
    if not found or min(found) != STOP + 1:
        _fail(f"the resumed run should start with iteration {STOP + 1}; it has {sorted(found)}")
    for iteration in sorted(found):
        difference = abs(found[iteration] - wanted[iteration])
        print(
            f"iteration {iteration}: loss straight {wanted[iteration]:.9f}, resumed "
            f"{found[iteration]:.9f}, difference {difference:.1e}"
        )
    first = abs(found[STOP + 1] - wanted[STOP + 1])
    if not first <= MAX_LOSS_DIFFERENCE:
        _fail(f"the first resumed loss differs by {first:.2e}, more than {MAX_LOSS_DIFFERENCE}")


def check_perplexity(records: list[dict[str, Any]]) -> None:
    """Fail unless the model is far better than word frequencies."""
    losses = [r["valid_lm_loss"] for r in records if "valid_lm_loss" in r]
    if not losses:
        _fail("the run has no record of an evaluation")
    perplexity = math.exp(losses[-1])
    train, valid = (read_tokens(str(DATA / f"{split}_text_document")) for split in SPLITS)
    unigram = unigram_perplexity(train, valid, VOCAB_SIZE)
    print(f"validation perplexity: model {perplexity:.1f}, token frequencies {unigram:.1f}")
    limit = MAX_SHARE_OF_UNIGRAM * unigram
    if not perplexity < limit:
        _fail(f"the model's perplexity {perplexity:.1f} is not below {limit:.1f}")


def _program(name: str) -> str:
    """A program of this environment, as a path that works when copied."""
    return os.path.relpath(Path(sys.executable).parent / name)


def _title(number: str, text: str) -> None:
    print(f"\n=== {number}/6 {text}", flush=True)


def _run(*words: str | int | float | Path) -> None:
    command = [str(word) for word in words]
    print("\n$ " + shlex.join(command), flush=True)
    start = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    if status:
        _fail(f"the command above ended with status {status}")
    print(f"({time.monotonic() - start:.0f} s)", flush=True)


def _fail(reason: str) -> NoReturn:
    sys.exit(f"\nDEMO FAILED: {reason}")


if __name__ == "__main__":
    main()
