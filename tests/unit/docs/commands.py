"""The shell commands that the pages and example scripts show, and whether they could run."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.run import get_args_parser

from mcore.cli.main import _build_parser
from mcore.errors import ConfigError
from mcore.training.arguments import parse
from mcore.training.prepare import settle_options
from tools.preprocess_data import _parser as preprocessing_parser

ROOT = Path(__file__).parents[3]

#: Programs of others, whose words we do not check.
FOREIGN = {"pip", "source", "tensorboard", "py-spy", "env", "nsys"}

_BLOCK = re.compile(
    r"(?:<!-- run(?P<run>[^>]*)-->\n *)?```(?:console|bash)\n(?P<text>.*?)```", re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block of commands.

    Attributes:
        page: file that shows it.
        text: its lines.
        environment: variables to run it with (`<!-- run NAME=VALUE ... -->` before it); None = it
            is not run.
    """

    page: Path
    text: str
    environment: dict[str, str] | None

    @property
    def name(self) -> str:
        return f"{self.page.name}: {self.text.strip().splitlines()[0][:50]}"


def blocks(page: Path) -> list[Block]:
    """Every fenced block of commands of a page."""
    found = []
    for match in _BLOCK.finditer(page.read_text()):
        marked = match["run"]
        settings = None
        if marked is not None:
            settings = dict(word.split("=", 1) for word in marked.lstrip(":").split())
        found.append(Block(page, match["text"], settings))
    return found


def other_lines(page: Path) -> Iterator[str]:
    """Lines of a page's other literal blocks: indented ones, and fences that are not tagged."""
    fence = None
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            fence = line if fence is None else None
        elif fence == "```" or (fence is None and line.startswith("    ")):
            yield line.strip().removeprefix("$ ")


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a block: words without variables before them, comments or prompts.

    Of a block that shows output (its commands begin with `$ `) only the commands.
    """
    lines = text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        for is_separator, group in itertools.groupby(lexer, lambda word: set(word) <= set(";&|")):
            words = list(group)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if words and not is_separator:
                yield words


def check_command(words: list[str]) -> None:
    """Raise if a command could not be meant as it is written; `...` stands for more words."""
    program, *rest = words
    if "..." in words:
        rest = rest[: rest.index("...")]
    if program == "srun":
        check_command(words[1:])
    elif program == "torchrun":
        _check_torchrun(rest, is_complete="..." not in words)
    elif program == "python":
        _check_python(rest, is_complete="..." not in words)
    elif program == "mcore":
        if "..." not in words:
            _check_mcore(rest)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        wanted = [word for word in rest if "=" not in word]
        assert set(wanted) <= set(targets), words
    elif program in ("bash", "sbatch", "kubectl"):
        files = [word for word in rest if word.startswith(("examples/", ".ci/"))]
        assert files, words
        assert all((ROOT / file).exists() for file in files), words
    else:
        assert program in FOREIGN, f"nobody checks {program}: {shlex.join(words)}"


def check_pretraining(words: list[str], world_size: int) -> None:
    """Check flags as `pretrain_gpt.py` does before it starts anything, without its files."""
    arguments = parse(words)
    if arguments.get("checkpoint", "use_checkpoint_args"):
        return  # the model is in a checkpoint
    settle_options(arguments, world_size)


def _check_torchrun(words: list[str], *, is_complete: bool) -> None:
    args = get_args_parser().parse_args(words)
    world_size = int(args.nnodes.split(":")[-1]) * int(args.nproc_per_node)
    if not is_complete:
        assert args.training_script == "pretrain_gpt.py"
    elif args.module:
        assert args.training_script in ("mcore", "pytest")
        if args.training_script == "mcore":
            _check_mcore(args.training_script_args)
    elif args.training_script == "pretrain_gpt.py":
        check_pretraining(args.training_script_args, world_size)
    else:
        assert (ROOT / args.training_script).exists(), words


def _check_python(words: list[str], *, is_complete: bool) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, words
    else:
        assert (ROOT / words[0]).exists(), words
    if is_complete and words[0] == "tools/preprocess_data.py":
        preprocessing_parser().parse_args(words[1:])
    if is_complete and words[0] == "pretrain_gpt.py":
        check_pretraining(words[1:], 1)


def _check_mcore(words: list[str]) -> None:
    try:
        _build_parser(words).parse_args(words)
    except SystemExit as ended:  # --help
        if ended.code != 0:
            raise ConfigError(f"mcore {shlex.join(words)}") from ended


def launched_by(script: Path, folder: Path, **environment: str) -> list[list[str]]:
    """Every torchrun that a script starts: the words, with torchrun and Slurm's tools stood in for.

    Args:
        script: a bash script.
        folder: empty; the stand-ins are put here.
        environment: variables of the script.
    """
    stand_ins = {
        "torchrun": 'printf "%s\\0" torchrun "$@" >> "$CALLS"; printf "\\n" >> "$CALLS"',
        "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
        "scontrol": "printf 'machine-%s\\n' 1 2 3",
        "mcore": "true",
        "python": "true",
    }
    for name, body in stand_ins.items():
        path = folder / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    calls = folder / "calls"
    variables = {
        **os.environ,
        **environment,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(calls),
    }
    done = subprocess.run(
        ["bash", str(script)], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.rstrip("\0").split("\0") for line in calls.read_text().splitlines()]
