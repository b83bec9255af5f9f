"""A folder with everything that the pages' commands name, and the commands in sizes for a CPU.

Reduced are numbers alone (`SMALL`), the precision of nothing: the command keeps its other words.
torchrun starts `--standalone` one model (tensor x pipeline processes), or two where that makes no
more than four. `...` stands for the training command of the README.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import zstandard
from tokenizers import ByteLevelBPETokenizer
from torch.distributed.run import get_args_parser

from mcore.cli.main import main
from tests.equivalence.program import SINGLE, train
from tests.unit.docs.commands import ROOT, blocks, commands
from tools.preprocess_data import main as preprocess

GOLDEN = ROOT / "tests" / "golden"
MOST_PROCESSES = 4

#: What stands for a number after its flag.
SMALL = {
    "--num-layers": "4",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--micro-batch-size": "1",
    "--global-batch-size": "4",
    "--eval-micro-batch-size": "1",
    "--eval-global-batch-size": "4",
    "--train-iters": "4",
    "--lr-warmup-iters": "1",
    "--save-interval": "2",
    "--profile-step-start": "1",
    "--profile-step-end": "3",
    "--split": "90,8,2",
    "--message-megabytes": "0.1",
}
#: Added to every training.
ALWAYS = ["--eval-iters", "1", "--log-interval", "1", "--device", "cpu"]


def training_words() -> list[str]:
    """Flags of the README's training command, as printed."""
    shown = (words for block in blocks(ROOT / "README.md") for words in commands(block.text))
    words = next(w for w in shown if "pretrain_gpt.py" in w and "..." not in w)
    return words[words.index("pretrain_gpt.py") + 1 :]


def spelled_out(words: Sequence[str]) -> list[str]:
    """The words with the training command in the place of `...`; of several, of the last."""
    if "..." not in words:
        return list(words)
    last = len(words) - 1 - list(reversed(words)).index("...")
    before = [word for word in words[:last] if word != "..."]
    return [*before, *training_words(), *words[last + 1 :]]


def small(words: Sequence[str]) -> list[str]:
    """Flags of a training in sizes for a CPU."""
    pairs = itertools.pairwise(["", *words])
    split = [] if "--split" in words else ["--split", SMALL["--split"]]  # of few documents
    return [SMALL.get(flag, word) for flag, word in pairs] + split + ALWAYS


def small_torchrun(words: Sequence[str]) -> list[str]:
    """Words for torchrun: as many processes as a CPU bears, on this machine."""
    args = get_args_parser().parse_args(spelled_out(words))
    rest = args.training_script_args
    is_training = args.training_script == "pretrain_gpt.py"
    rest = small(rest) if is_training else list(rest)
    model = 1
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        model *= int(rest[rest.index(flag) + 1]) if flag in rest else 1
    machines = int(str(args.nnodes).split(":")[-1])
    wanted = min(int(args.nproc_per_node) * machines, 2 * model)
    size = wanted if wanted <= MOST_PROCESSES else model
    kept = ["--max-restarts", str(args.max_restarts), *(["-m"] if args.module else [])]
    return ["--standalone", "--nproc-per-node", str(size), *kept, args.training_script, *rest]


def make(folder: Path) -> None:
    """Put everything there that the pages name: corpora, tokenizer, checkpoints, models."""
    for name in ("corpus.jsonl", "vocab.json", "merges.txt"):
        shutil.copy(GOLDEN / "preprocess" / name, folder / name)
    shutil.copytree(GOLDEN / "checkpoints/llama/legacy_tp2_pp2", folder / "megatron-checkpoints")
    (folder / "corpus").mkdir()
    text = zstandard.compress((folder / "corpus.jsonl").read_bytes())
    (folder / "corpus" / "part1.jsonl.zst").write_bytes(text)
    before = Path.cwd()
    os.chdir(folder)  # the commands have relative paths, and a checkpoint keeps them
    try:
        _make_here()
    finally:
        os.chdir(before)


def _make_here() -> None:
    bpe = "--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt"
    lines = Path("corpus.jsonl").read_text().splitlines(keepends=True)
    Path("few.jsonl").write_text("".join(lines[:10]))  # for sets that are measured whole
    for name, copies in (("corpus", ["train"]), ("few", ["web", "code"])):
        words = f"--input {name}.jsonl --output-prefix data/{name} --append-eod {bpe}"
        assert preprocess(words.split()) == 0
        for copy, ending in itertools.product(copies, (".bin", ".idx", ".meta.json")):
            shutil.copy(f"data/{name}_text_document{ending}", f"data/{copy}{ending}")
    flags = small(training_words())
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        place = flags.index(flag)
        del flags[place : place + 2]
    flags.remove("--sequence-parallel")
    train([*flags, "--exit-interval", "2"], SINGLE)
    export = ["convert", "mcore-to-hf", "--load", "checkpoints"]
    assert main([*export, "--hf", "Meta-Llama-3-8B"]) == 0
    tokenizer = ByteLevelBPETokenizer("vocab.json", "merges.txt")
    tokenizer.save("Meta-Llama-3-8B/tokenizer.json")
    names = json.dumps({"eos_token": "<|endoftext|>"})
    Path("Meta-Llama-3-8B/tokenizer_config.json").write_text(names)


#: Programs of a block that is run, in front of the real ones.
_STAND_INS = {
    "torchrun": 'exec {python} -m tests.unit.docs.documented torchrun "$@"',
    "python": '[[ $1 == pretrain_gpt.py ]] || exec {python} "$@"\n'
    'exec {python} -m tests.unit.docs.documented python "$@"',
    "mcore": '[[ " $* " == *" ... "* ]] || exec {python} -m mcore "$@"\n'
    'exec {python} -m tests.unit.docs.documented mcore "$@"',
    "pip": "true",
    "tensorboard": "true",
}


def put_stand_ins(folder: Path) -> None:
    """Write programs that reduce their words and start the real ones."""
    folder.mkdir()
    for name, body in _STAND_INS.items():
        path = folder / name
        path.write_text(f"#!/usr/bin/env bash\n{body.format(python=sys.executable)}\n")
        path.chmod(0o755)


def reduced(program: str, words: Sequence[str]) -> list[str]:
    """What Python is started with instead of a program with its words."""
    if program == "torchrun":
        return ["-m", "torch.distributed.run", *small_torchrun(words)]
    if program == "mcore":
        return ["-m", "mcore", *spelled_out(words)]
    if words[:1] == ["pretrain_gpt.py"]:
        return ["pretrain_gpt.py", *small(spelled_out(words[1:]))]
    return list(words)


def daily(pages: Sequence[Path]) -> Iterator[list[str]]:
    """The commands of the pages' blocks to run that need no other process."""
    for page in pages:
        for block in blocks(page):
            if block.environment is None:
                continue
            for words in commands(block.text):
                if words[0] == "mcore" or words[:2] == ["python", "tools/preprocess_data.py"]:
                    yield words


if __name__ == "__main__":
    command = [sys.executable, *reduced(sys.argv[1], sys.argv[2:])]
    os.execv(command[0], command)
