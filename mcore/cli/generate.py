"""`mcore generate`: let a checkpoint's model continue a text."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from mcore.config.command_line import add_flags
from mcore.config.fields import flag_of
from mcore.config.tokenizer import TokenizerConfig
from mcore.device import pick_device
from mcore.errors import ConfigError
from mcore.generation import Sampling, generate, load_model
from mcore.tokenizers import Tokenizer, build_tokenizer


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "generate",
        help="let a trained model continue a text",
        description="Reads a checkpoint of any layout, in one process. Model and tokenizer are "
        "those that the checkpoint names; a tokenizer flag replaces what is stored.",
    )
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="save root, or one iteration's directory")
    add("--ckpt-step", type=int, metavar="N", help="iteration; the pointer file's when absent")
    add("--prompt", required=True, metavar="TEXT", help="text to continue")
    add("--max-new-tokens", type=int, default=100, metavar="N", help="default: 100")
    add("--greedy", action="store_true", help="always the most likely token")
    add("--temperature", type=float, default=1.0, metavar="T", help="default: 1")
    add("--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest; 0 = all")
    add(
        "--top-p", type=float, default=1.0, metavar="P", help="... that have probability P together"
    )
    add("--seed", type=int, default=1234, help="the same seed gives the same text; default: 1234")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    tokenizer = parser.add_argument_group("tokenizer (default: the checkpoint's)")
    add_flags(tokenizer, TokenizerConfig, omit=("make_vocab_size_divisible_by",))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the prompt and what follows it, as it comes.

    Raises:
        McoreError: options, checkpoint or tokenizer that cannot be used.
    """
    if args.max_new_tokens < 0:
        raise ConfigError(f"--max-new-tokens is {args.max_new_tokens}; use 0 or more")
    sampling = Sampling(
        greedy=args.greedy, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p
    )
    loaded = load_model(args.load, args.ckpt_step, pick_device(args.device, 0))
    tokenizer = build_tokenizer(tokenizer_config(loaded.options, vars(args)))
    tokens = tokenizer.tokenize(args.prompt)
    shown = ""
    for token in generate(
        loaded.model,
        tokens,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        seed=args.seed,
        stop_id=_end_of_document(tokenizer),
    ):
        tokens.append(token)
        shown = _print_news(tokenizer.detokenize(tokens), shown)
    print(tokenizer.detokenize(tokens)[len(shown) :])
    return 0


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
