"""`mcore convert`: models of other programs in and out."""

from __future__ import annotations

import argparse
from pathlib import Path

from mcore.checkpoint import complete_iterations, latest_iteration
from mcore.convert import hf_to_state, load_model_state, save_model_state, state_to_hf
from mcore.convert.hf_tokenizer import FOLDER as TOKENIZER_FOLDER
from mcore.convert.hf_tokenizer import copy_tokenizer, tokenizer_options
from mcore.convert.logits import largest_logit_difference
from mcore.errors import CheckpointError


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its sub-commands."""
    parser = subparsers.add_parser(
        "convert", help="models of other programs in and out", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _register_import(commands)
    _register_export(commands)


def _register_import(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "hf-to-mcore",
        help="a Hugging Face model (GPT-2, Llama, Mistral, Qwen2, Qwen3) becomes iteration 0 of a "
        "checkpoint",
        description="The result holds the model and its options, no optimizer state: train from it "
        "with --load DIR --use-checkpoint-args --finetune.",
        allow_abbrev=False,
    )
    parser.add_argument("--hf", required=True, metavar="DIR", help="config.json and safetensors")
    parser.add_argument("--save", required=True, metavar="DIR", help="save root to write")
    _add_comparison(parser)
    _add_overwrite(parser)
    parser.set_defaults(run=hf_to_mcore)


def _register_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "mcore-to-hf",
        help="the model of a checkpoint becomes a Hugging Face folder",
        description="Reads a checkpoint of any layout and writes config.json and safetensors.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--load", required=True, metavar="DIR", help="save root, or directory of one iteration"
    )
    parser.add_argument("--hf", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--ckpt-step", type=int, help="iteration to read; the pointer file's when absent"
    )
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help="family to write, such as mistral; the first that fits when absent",
    )
    _add_comparison(parser)
    _add_overwrite(parser)
    parser.set_defaults(run=mcore_to_hf)


def _add_comparison(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-logits",
        action="store_true",
        help="do not compare the logits of both models, which takes both in memory",
    )


def _add_overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--overwrite-save", action="store_true", help="write over a model that is there already"
    )


def hf_to_mcore(args: argparse.Namespace) -> int:
    """`mcore convert hf-to-mcore`.

    Raises:
        CheckpointError: the save root holds checkpoints already, or the folder is damaged.
        UnsupportedError: a model that mcore does not compute.
    """
    occupied = latest_iteration(args.save) is not None or complete_iterations(args.save)
    if occupied and not args.overwrite_save:
        raise CheckpointError(
            f"{args.save} holds checkpoints already; choose another --save or add --overwrite-save"
        )
    options, tensors = hf_to_state(args.hf)
    source = {"format": "huggingface", "folder": Path(args.hf).resolve().name}
    kept = Path(args.save) / TOKENIZER_FOLDER
    copied = copy_tokenizer(Path(args.hf), kept)
    directory = save_model_state(args.save, options | tokenizer_options(kept), tensors, source)
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"wrote {len(tensors)} tensors, {count:,} parameters to {directory}")
    if copied:
        print(f"copied {', '.join(copied)} to {kept}")
    _compare(args, directory, None)
    return 0


def _compare(args: argparse.Namespace, checkpoint: Path | str, iteration: int | None) -> None:
    if args.no_logits:
        return
    difference = largest_logit_difference(checkpoint, args.hf, iteration)
    if difference is None:
        print("logits were not compared: the transformers library is not installed")
    else:
        print(f"largest difference of the logits: {difference:.3g}")


def mcore_to_hf(args: argparse.Namespace) -> int:
    """`mcore convert mcore-to-hf`.

    Raises:
        CheckpointError: the folder holds a model already, or the checkpoint is absent or damaged.
        UnsupportedError: no Hugging Face family fits.
    """
    folder = Path(args.hf)
    occupied = (folder / "config.json").exists() or any(folder.glob("*.safetensors"))
    if occupied and not args.overwrite_save:
        raise CheckpointError(
            f"{folder} holds a model already; choose another --hf or add --overwrite-save"
        )
    options, tensors = load_model_state(args.load, args.ckpt_step)
    state_to_hf(options, tensors, folder, args.model_type)
    print(f"wrote {len(tensors)} tensors to {folder}")
    root = Path(args.load)
    for kept in (root / TOKENIZER_FOLDER, root.parent / TOKENIZER_FOLDER):
        if kept.is_dir():
            print(f"copied {', '.join(copy_tokenizer(kept, folder))} to {folder}")
            break
    _compare(args, args.load, args.ckpt_step)
    return 0
