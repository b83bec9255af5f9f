"""`mcore convert`: models of other programs in and out."""

from __future__ import annotations

import argparse
from pathlib import Path

from mcore.checkpoint import complete_iterations, latest_iteration
from mcore.convert import (
    ModelOptions,
    hf_to_state,
    load_model_state,
    save_model_state,
    state_to_hf,
)
from mcore.convert.hf_tokenizer import FOLDER as TOKENIZER_FOLDER
from mcore.convert.hf_tokenizer import copy_tokenizer, tokenizer_options
from mcore.convert.logits import largest_logit_difference
from mcore.convert.megatron_dist import is_torch_dist, read_torch_dist
from mcore.convert.megatron_legacy import read_legacy, write_legacy
from mcore.errors import CheckpointError, ConfigError


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its sub-commands."""
    parser = subparsers.add_parser(
        "convert", help="models of other programs in and out", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _register_import(commands)
    _register_export(commands)
    _register_megatron(commands)


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


def _register_megatron(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "megatron-to-mcore",
        help="a Megatron-LM checkpoint (torch or torch_dist) becomes iteration 0 of a checkpoint",
        description="Reads the model's weights of any layout; nothing in the pickles is run.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--megatron", required=True, metavar="DIR", help="save root, or one iteration's folder"
    )
    parser.add_argument("--save", required=True, metavar="DIR", help="save root to write")
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="token ids that exist; the checkpoint's, or its padded number, when absent",
    )
    _add_overwrite(parser)
    parser.set_defaults(run=megatron_to_mcore)
    parser = commands.add_parser(
        "mcore-to-megatron",
        help="the model of a checkpoint becomes a Megatron-LM checkpoint (torch)",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--load", required=True, metavar="DIR", help="save root, or directory of one iteration"
    )
    parser.add_argument("--megatron", required=True, metavar="DIR", help="save root to write")
    parser.add_argument(
        "--ckpt-step", type=int, help="iteration to read; the pointer file's when absent"
    )
    parser.add_argument(
        "--tensor-model-parallel-size", type=int, default=1, metavar="N", help="default: 1"
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        metavar="N[,N]",
        help="layers of each pipeline stage in turn, those of its virtual stages with commas; one "
        "stage when absent",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by", type=int, default=128, metavar="N", help="default: 128"
    )
    parser.add_argument(
        "--fused-norms", action="store_true", help="names of transformer-engine for the norms"
    )
    parser.set_defaults(run=mcore_to_megatron)


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
    _refuse_occupied(args)
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


def _refuse_occupied(args: argparse.Namespace) -> None:
    occupied = latest_iteration(args.save) is not None or complete_iterations(args.save)
    if occupied and not args.overwrite_save:
        raise CheckpointError(
            f"{args.save} holds checkpoints already; choose another --save or add --overwrite-save"
        )


def _compare(args: argparse.Namespace, checkpoint: Path | str, iteration: int | None) -> None:
    if args.no_logits:
        return
    difference = largest_logit_difference(checkpoint, args.hf, iteration)
    if difference is None:
        print("logits were not compared: the transformers library is not installed")
    else:
        print(f"largest difference of the logits: {difference:.3g}")


def megatron_to_mcore(args: argparse.Namespace) -> int:
    """`mcore convert megatron-to-mcore`.

    Raises:
        CheckpointError: the save root holds checkpoints already, or the folder is damaged.
        UnsupportedError: a model that mcore does not compute.
    """
    _refuse_occupied(args)
    read = read_torch_dist if is_torch_dist(args.megatron) else read_legacy
    options, tensors = read(args.megatron, args.vocab_size)
    source = {"format": "megatron", "folder": Path(args.megatron).resolve().name}
    directory = save_model_state(args.save, options.as_dict(), tensors, source)
    print(f"wrote {len(tensors)} tensors, vocabulary {options.vocab_size}, to {directory}")
    return 0


def mcore_to_megatron(args: argparse.Namespace) -> int:
    """`mcore convert mcore-to-megatron`.

    Raises:
        CheckpointError: the folder holds a model already, or the checkpoint is absent or damaged.
        ConfigError: layers that do not add up.
        UnsupportedError: Megatron has no spelling for an option.
    """
    target = Path(args.megatron)
    if target.is_dir() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty; name a new folder with --megatron")
    try:
        layers = [[int(n) for n in stage.split(",")] for stage in args.layers or ()]
    except ValueError as error:
        raise ConfigError(f"--layers {' '.join(args.layers)}: give numbers") from error
    options, tensors = load_model_state(args.load, args.ckpt_step)
    folder = write_legacy(
        ModelOptions.from_mapping(options),
        tensors,
        target,
        tp=args.tensor_model_parallel_size,
        layers=layers,
        divisible_by=args.make_vocab_size_divisible_by,
        fused_norms=args.fused_norms,
    )
    print(f"wrote {len(tensors)} tensors to {folder}")
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
    state_to_hf(options, tensors, folder, args.model_type)
    print(f"wrote {len(tensors)} tensors to {folder}")
    root = Path(args.load)
    for kept in (root / TOKENIZER_FOLDER, root.parent / TOKENIZER_FOLDER):
        if kept.is_dir():
            print(f"copied {', '.join(copy_tokenizer(kept, folder))} to {folder}")
            break
    _compare(args, args.load, args.ckpt_step)
    return 0
