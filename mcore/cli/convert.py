"""`mcore convert`: models of other programs in and out."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from mcore.checkpoint import complete_iterations, latest_iteration
from mcore.convert import (
    ModelOptions,
    hf_to_state,
    load_model_state,
    save_model_state,
    state_to_hf,
)
from mcore.convert.deepspeed import read_hf_deepspeed, read_megatron_deepspeed
from mcore.convert.hf_files import CONFIG
from mcore.convert.hf_tokenizer import FOLDER as TOKENIZER_FOLDER
from mcore.convert.hf_tokenizer import (
    copy_tokenizer,
    keep_config,
    kept_tokenizer,
    token_ids,
    tokenizer_options,
)
from mcore.convert.logits import largest_logit_difference
from mcore.convert.megatron_args import tokenizer_args
from mcore.convert.megatron_dist import is_torch_dist, read_torch_dist
from mcore.convert.megatron_export import write_legacy
from mcore.convert.megatron_legacy import read_legacy
from mcore.errors import CheckpointError, ConfigError
from mcore.log import get_logger

#: Of logits in float32; what was seen of correct conversions is below 1e-5.
_LARGEST_ROUNDING = 1e-3

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Run: TypeAlias = Callable[[argparse.Namespace], int]


def register(subparsers: Commands) -> None:
    """Add the command and its sub-commands."""
    parser = subparsers.add_parser(
        "convert", help="models of other programs in and out", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _register_imports(commands)
    _register_exports(commands)


def _register_imports(commands: Commands) -> None:
    parser = _importer(
        commands,
        hf_to_mcore,
        "a Hugging Face model (GPT-2, Llama, Mistral, Qwen2, Qwen3)",
        "The result holds the model and its options, no optimizer state: train from it with "
        "--load DIR --use-checkpoint-args --finetune.",
    )
    parser.add_argument("--hf", required=True, metavar="DIR", help="config.json and safetensors")
    _add_comparison(parser)
    parser = _importer(
        commands,
        megatron_to_mcore,
        "a Megatron-LM checkpoint (torch or torch_dist)",
        "Reads the model's weights of any layout; nothing in the pickles is run.",
    )
    parser.add_argument(
        "--megatron", required=True, metavar="DIR", help="save root, or one iteration's folder"
    )
    _add_vocab_size(parser)
    parser = _importer(
        commands,
        deepspeed_to_mcore,
        "a DeepSpeed checkpoint (ZeRO 0 to 3) of Megatron-DeepSpeed or a Hugging Face model",
        "Reads the weights in fp32, of any number of ranks, without DeepSpeed; nothing in the "
        "pickles is run.",
    )
    parser.add_argument(
        "--deepspeed", required=True, metavar="DIR", help="save root, or one step's folder"
    )
    parser.add_argument(
        "--hf-config", metavar="FILE", help="config.json, where the model is a Hugging Face one"
    )
    _add_vocab_size(parser)


def _importer(commands: Commands, run: Run, what: str, description: str) -> argparse.ArgumentParser:
    parser = _command(commands, run, f"{what} becomes iteration 0 of a checkpoint", description)
    parser.add_argument("--save", required=True, metavar="DIR", help="save root to write")
    _add_overwrite(parser)
    return parser


def _register_exports(commands: Commands) -> None:
    parser = _exporter(commands, mcore_to_hf, "a Hugging Face folder, config.json and safetensors")
    parser.add_argument("--hf", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help="family to write, such as mistral; the first that fits when absent",
    )
    _add_comparison(parser)
    _add_overwrite(parser)
    parser = _exporter(commands, mcore_to_megatron, "a Megatron-LM checkpoint (torch)")
    parser.add_argument("--megatron", required=True, metavar="DIR", help="save root to write")
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


def _exporter(commands: Commands, run: Run, what: str) -> argparse.ArgumentParser:
    about = f"the model of a checkpoint of any layout becomes {what}"
    parser = _command(commands, run, about, f"{about[0].upper()}{about[1:]}.")
    parser.add_argument(
        "--load", required=True, metavar="DIR", help="save root, or directory of one iteration"
    )
    parser.add_argument(
        "--ckpt-step", type=int, help="iteration to read; the pointer file's when absent"
    )
    return parser


def _command(commands: Commands, run: Run, about: str, description: str) -> argparse.ArgumentParser:
    """A sub-command, named after the function that runs it."""
    parser = commands.add_parser(
        run.__name__.replace("_", "-"), help=about, description=description, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


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


def _add_vocab_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="token ids that exist; the checkpoint's, or its padded number, when absent",
    )


def hf_to_mcore(args: argparse.Namespace) -> int:
    """`mcore convert hf-to-mcore`.

    Raises:
        CheckpointError: the save root holds checkpoints already, or the folder is damaged.
        UnsupportedError: a model that mcore does not compute.
    """
    replaces = _refuse_occupied(args)
    source, kept = Path(args.hf), Path(args.save) / TOKENIZER_FOLDER
    options, tensors = hf_to_state(source)
    options |= tokenizer_options(source, kept)
    directory = _save(args, options, tensors, "huggingface", args.hf)
    _keep_tokenizer(kept, source, source / CONFIG, replaces)
    _compare(args, directory, None)
    return 0


def megatron_to_mcore(args: argparse.Namespace) -> int:
    """`mcore convert megatron-to-mcore`.

    Raises:
        CheckpointError: the save root holds checkpoints already, or the folder is damaged.
        UnsupportedError: a model that mcore does not compute.
    """
    replaces = _refuse_occupied(args)
    read = read_torch_dist if is_torch_dist(args.megatron) else read_legacy
    options, tensors = read(args.megatron, args.vocab_size)
    _save(args, options.as_dict(), tensors, "megatron", args.megatron)
    _keep_tokenizer(Path(args.save) / TOKENIZER_FOLDER, None, None, replaces)
    return 0


def deepspeed_to_mcore(args: argparse.Namespace) -> int:
    """`mcore convert deepspeed-to-mcore`.

    Raises:
        CheckpointError: the save root holds checkpoints already, or the folder is damaged.
        ConfigError: a vocabulary for a model whose config.json says it.
        UnsupportedError: a model that mcore does not compute.
    """
    replaces = _refuse_occupied(args)
    config = None if args.hf_config is None else Path(args.hf_config)
    if config is None:
        of_megatron, tensors = read_megatron_deepspeed(args.deepspeed, args.vocab_size)
        options = of_megatron.as_dict()
    elif args.vocab_size is not None:
        raise ConfigError("--vocab-size: --hf-config says the vocabulary")
    else:
        options, tensors = read_hf_deepspeed(args.deepspeed, args.hf_config)
    _save(args, options, tensors, "deepspeed", args.deepspeed)
    _keep_tokenizer(Path(args.save) / TOKENIZER_FOLDER, None, config, replaces)
    return 0


def _save(
    args: argparse.Namespace,
    options: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    program: str,
    source: str,
) -> Path:
    """Write the model as iteration 0 and say so."""
    origin = {"format": program, "folder": Path(source).resolve().name}
    directory = save_model_state(args.save, options, tensors, origin)
    shapes = ModelOptions.from_mapping(options).shapes()
    count = sum(math.prod(shape) for shape in shapes.values())
    print(
        f"wrote {len(tensors)} tensors, {count:,} parameters, vocabulary {options['vocab_size']}, "
        f"to {directory}"
    )
    return directory


def _keep_tokenizer(target: Path, source: Path | None, config: Path | None, replaces: bool) -> None:
    """Keep what belongs to a model beside it, once the model is there."""
    copied = copy_tokenizer(source, target, replaces=replaces)
    keep_config(config, target, replaces=replaces)
    if copied:
        print(f"copied {', '.join(copied)} to {target}")


def _refuse_occupied(args: argparse.Namespace) -> bool:
    """Whether there is a model to write over, which takes `--overwrite-save`."""
    occupied = latest_iteration(args.save) is not None or bool(complete_iterations(args.save))
    if occupied and not args.overwrite_save:
        raise CheckpointError(
            f"{args.save} holds checkpoints already; choose another --save or add --overwrite-save"
        )
    return occupied


def _compare(args: argparse.Namespace, checkpoint: Path | str, iteration: int | None) -> None:
    if args.no_logits:
        return
    difference = largest_logit_difference(checkpoint, args.hf, iteration)
    if difference is None:
        print("logits were not compared: the transformers library is not installed")
        return
    print(f"largest difference of the logits: {difference:.3g}")
    if not difference <= _LARGEST_ROUNDING:
        get_logger().warning(
            "that is more than rounding (both models are computed in float32): do not trust the "
            "converted model, something in it is computed in another way"
        )


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
        more_args=tokenizer_args(options),
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
    kept = kept_tokenizer(Path(args.load), options)
    ids = None if kept is None else token_ids(kept)
    state_to_hf(options, tensors, folder, args.model_type, ids)
    print(f"wrote {len(tensors)} tensors to {folder}")
    copied = copy_tokenizer(kept, folder, replaces=occupied)
    if copied:
        print(f"copied {', '.join(copied)} to {folder}")
    _compare(args, args.load, args.ckpt_step)
    return 0
