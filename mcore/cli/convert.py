"""`mcore convert`: models of other programs in and out."""

from __future__ import annotations

import argparse
from pathlib import Path

from mcore.checkpoint import complete_iterations, latest_iteration
from mcore.convert import hf_to_state, load_model_state, save_model_state, state_to_hf
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
        help="a Hugging Face model (GPT-2, Llama) becomes iteration 0 of a checkpoint",
        description="The result holds the model and its options, no optimizer state: train from it "
        "with --load DIR --use-checkpoint-args --finetune.",
        allow_abbrev=False,
    )
    parser.add_argument("--hf", required=True, metavar="DIR", help="config.json and safetensors")
    parser.add_argument("--save", required=True, metavar="DIR", help="save root to write")
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
    _add_overwrite(parser)
    parser.set_defaults(run=mcore_to_hf)


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
    directory = save_model_state(args.save, options, tensors, source)
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"wrote {len(tensors)} tensors, {count:,} parameters to {directory}")
    return 0


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
    state_to_hf(options, tensors, folder)
    print(f"wrote {len(tensors)} tensors to {folder}")
    return 0
