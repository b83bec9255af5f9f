"""`mcore generate`: let a checkpoint's model continue texts."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore import parallel_state
from mcore.config.command_line import add_flags
from mcore.config.fields import flag_of
from mcore.config.tokenizer import TokenizerConfig
from mcore.errors import ConfigError
from mcore.generation import (
    LoadedModel,
    Sampling,
    generate,
    generate_batch,
    load_model,
    prompt_problem,
)
from mcore.tokenizers import Tokenizer, build_tokenizer
from mcore.topology.collectives import all_gather_object
from mcore.topology.context import ParallelContext
from mcore.training.checkpointing import moved_tokenizer
from mcore.training.initialize import join_world, leave_world, read_launch

#: A replica continues so many prompts together; each has keys and values in memory.
_BATCH = 32


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "generate",
        help="let a trained model continue texts",
        description="Reads a checkpoint of any layout, in one process or, under torchrun, spread "
        "over tensor- and pipeline-parallel ranks; further ranks are replicas that share the "
        "prompts out. Model and tokenizer are those that the checkpoint names; a tokenizer flag "
        "replaces what is stored.",
    )
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="save root, or one iteration's directory")
    add("--ckpt-step", type=int, metavar="N", help="iteration; the pointer file's when absent")
    add("--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated")
    add("--prompts-file", metavar="FILE", help="a text to continue on each line")
    add("--max-new-tokens", type=int, default=100, metavar="N", help="default: 100")
    add("--greedy", action="store_true", help="always the most likely token")
    add("--temperature", type=float, metavar="T", help="default: 1")
    add("--top-k", type=int, metavar="K", help="choose among the K likeliest; 0 = all")
    add("--top-p", type=float, metavar="P", help="... that have probability P together")
    add(
        "--seed",
        type=int,
        default=1234,
        help="the same seed gives the same texts at every layout; default: 1234",
    )
    add("--json", action="store_true", help="print a JSON list with an object for each prompt")
    add("--tensor-model-parallel-size", type=int, default=1, metavar="T", help="default: 1")
    add("--pipeline-model-parallel-size", type=int, default=1, metavar="P", help="default: 1")
    add("--bf16", action="store_true", help="compute in bfloat16; float32 when absent")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    tokenizer = parser.add_argument_group("tokenizer (default: the checkpoint's)")
    add_flags(tokenizer, TokenizerConfig, omit=("make_vocab_size_divisible_by",))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print every prompt and what follows it; a single one as it comes.

    Raises:
        McoreError: options, checkpoint or tokenizer that cannot be used.
    """
    if args.max_new_tokens < 0:
        raise ConfigError(f"--max-new-tokens is {args.max_new_tokens}; use 0 or more")
    sampling = _sampling(args)
    prompts = _prompts(args)
    world = join_world(read_launch(), args.device)
    try:
        ctx = parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        )
        loaded = load_model(args.load, args.ckpt_step, world.device, ctx=ctx, bf16=args.bf16)
        options = moved_tokenizer(loaded.options, Path(loaded.directory))
        tokenizer = build_tokenizer(tokenizer_config(options, vars(args)))
        _Session(args, sampling, ctx, loaded, tokenizer).continue_all(prompts)
    finally:
        leave_world(world.is_owned)
    return 0


def _sampling(args: argparse.Namespace) -> Sampling:
    options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    typed = {name: value for name, value in options.items() if value is not None}
    if args.greedy and typed:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in typed)
        raise ConfigError(
            f"--greedy always takes the most likely token, and leaves {flags} nothing to choose; "
            "drop one side"
        )
    return Sampling(greedy=args.greedy, **typed)


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt or [])
    if args.prompts_file is not None:
        prompts += _lines(Path(args.prompts_file))
    if not prompts:
        raise ConfigError("nothing to continue; give --prompt TEXT or --prompts-file FILE")
    return prompts


def _lines(path: Path) -> list[str]:
    """Lines end with a line feed and with nothing else that some take for an end of line."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"cannot read --prompts-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts-file {path} is not text in UTF-8: {error}") from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


@dataclass(frozen=True, slots=True)
class _Session:
    """What one call of the command works with."""

    args: argparse.Namespace
    sampling: Sampling
    ctx: ParallelContext
    loaded: LoadedModel
    tokenizer: Tokenizer

    def continue_all(self, prompts: list[str]) -> None:
        """Continue the prompts and print them on rank 0."""
        encoded = [list(self.tokenizer.tokenize(prompt)) for prompt in prompts]
        self._check(encoded)
        if len(prompts) == 1 and self.ctx.dp.size == 1 and not self.args.json:
            self._stream(encoded[0])
            return
        added = self._continue(encoded)
        if self.ctx.rank != 0:
            return
        texts = [self.tokenizer.detokenize(p + a) for p, a in zip(encoded, added, strict=True)]
        if self.args.json:
            rows = zip(prompts, texts, encoded, added, strict=True)
            names = ("prompt", "text", "prompt_tokens", "new_tokens")
            print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        else:
            print("\n\n".join(texts))

    def _check(self, prompts: list[list[int]]) -> None:
        typed = len(self.args.prompt or [])
        for number, prompt in enumerate(prompts, 1):
            problem = prompt_problem(prompt, self.loaded.model)
            if problem is not None:
                line = number - typed
                place = f" (line {line} of {self.args.prompts_file})" if line > 0 else ""
                raise ConfigError(f"prompt {number}{place} {problem}")

    def _continue(self, prompts: list[list[int]]) -> list[list[int]]:
        """The new tokens of each prompt; replicas take every d-th prompt, a batch at a time."""
        replica, replicas = self.ctx.dp.rank, self.ctx.dp.size
        mine = range(replica, len(prompts), replicas)
        added: dict[int, list[int]] = {}
        for start in range(0, len(mine), _BATCH):
            added |= self._continue_batch(prompts, mine[start : start + _BATCH])
        everyone: dict[int, list[int]] = {}
        for part in all_gather_object(added, self.ctx.dp):
            everyone.update(part)
        return [everyone[number] for number in range(len(prompts))]

    def _continue_batch(
        self, prompts: list[list[int]], numbers: Sequence[int]
    ) -> dict[int, list[int]]:
        """The new tokens of some prompts by number."""
        added: dict[int, list[int]] = {number: [] for number in numbers}
        for step in generate_batch(
            self.loaded.model,
            [prompts[number] for number in numbers],
            max_new_tokens=self.args.max_new_tokens,
            sampling=self.sampling,
            seeds=[self.args.seed + number for number in numbers],
            stop_id=_end_of_document(self.tokenizer),
            ctx=self.ctx,
        ):
            for tokens, token in zip(added.values(), step, strict=True):
                tokens += [] if token is None else [token]
        return added

    def _stream(self, prompt: Sequence[int]) -> None:
        tokens, shown, prints = list(prompt), "", self.ctx.rank == 0
        for token in generate(
            self.loaded.model,
            prompt,
            max_new_tokens=self.args.max_new_tokens,
            sampling=self.sampling,
            seed=self.args.seed,
            stop_id=_end_of_document(self.tokenizer),
            ctx=self.ctx,
        ):
            tokens.append(token)
            if prints:
                shown = _print_news(self.tokenizer.detokenize(tokens), shown)
        if prints:
            print(self.tokenizer.detokenize(tokens)[len(shown) :])


def tokenizer_config(options: dict[str, Any], typed: dict[str, Any]) -> TokenizerConfig:
    """The tokenizer that a checkpoint names, save what was typed.

    Typing another kind of tokenizer drops the stored files and special ids, which belong to the
    stored kind.

    Raises:
        ConfigError: nobody names a tokenizer.
    """
    fields = dataclasses.fields(TokenizerConfig)
    values = {field.name: typed[field.name] for field in fields if field.name in typed}
    same_kind = typed.get("tokenizer_type") in (None, options.get("tokenizer_type"))
    for field in fields:
        described, stored = flag_of(field), options.get(field.name)
        if same_kind and described is not None and described.model and stored is not None:
            values.setdefault(field.name, stored)
    if values.get("tokenizer_type") is None:
        raise ConfigError(
            "the checkpoint names no tokenizer; give --tokenizer-type and the files it needs"
        )
    return TokenizerConfig(**values)


def _end_of_document(tokenizer: Tokenizer) -> int | None:
    try:
        return tokenizer.eod
    except ConfigError:
        return None


def _print_news(text: str, shown: str) -> str:
    """Print what is new and settled: the last word's bytes may still change with the next token."""
    settled = text[: text.rfind(" ")] if " " in text else ""
    if len(settled) <= len(shown) or not settled.startswith(shown):
        return shown
    print(settled[len(shown) :], end="", flush=True)
    return settled
