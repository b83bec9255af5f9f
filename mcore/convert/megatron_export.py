"""Megatron-LM's `torch` checkpoints: one pickle a model-parallel rank, written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore.checkpoint.commit import replace_file
from mcore.convert.megatron_args import args_from_options
from mcore.convert.megatron_legacy import POINTER, RANK_FILE, RELEASE, WORD_EMBEDDINGS
from mcore.convert.megatron_names import fused_name, layer_of, renumbered, shared_out
from mcore.convert.model_options import ModelOptions, check_shapes
from mcore.errors import CheckpointError, ConfigError

_VERSION = 3.0
#: Arguments that Megatron reads from a checkpoint without a default and that say nothing here.
_ARGS_OF_A_RUN: Mapping[str, Any] = {
    "iteration": 0,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "skipped_train_samples": 0,
    "data_parallel_random_init": False,
    "global_batch_size": None,
    "tokenizer_type": None,
}


def write_legacy(
    options: ModelOptions,
    tensors: Mapping[str, Tensor],
    root: Path,
    *,
    tp: int = 1,
    layers: Sequence[Sequence[int]] = (),
    divisible_by: int = 128,
    fused_norms: bool = False,
    more_args: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder that Megatron-LM loads with `--ckpt-format torch`: weights that are released.

    `release` is Megatron's word for a model without optimizer state, from which training starts at
    iteration 0; many of its versions refuse an iteration with that number.

    Args:
        options: of the model.
        tensors: its parameters by our name, whole.
        root: save root to write.
        tp: tensor-parallel size.
        layers: `layers[pipeline rank][chunk]`, number of layers; one stage with all when empty.
        divisible_by: rows of the vocabulary on each rank are a multiple of this.
        fused_norms: use the norms' names of transformer-engine.
        more_args: further members of the run's arguments, such as `tokenizer_type`.

    Returns:
        The folder of the ranks.

    Raises:
        CheckpointError: the parameters are not those of the model, it cannot be cut like that, or
            the disk is full.
        ConfigError: the layers do not add up, or a size is no positive number.
    """
    for what, size in (("tensor-parallel size", tp), ("divisor of the vocabulary", divisible_by)):
        if size < 1:
            raise ConfigError(f"the {what} is {size}; use 1 or more")
    check_shapes(options, tensors)
    layers = layers or [[options.num_layers]]
    total = sum(map(sum, layers))
    negative = any(count < 0 for stage in layers for count in stage)
    if len({len(stage) for stage in layers}) != 1:
        raise ConfigError(
            f"layers per stage {[list(stage) for stage in layers]}: every stage needs the same "
            "number of virtual stages (numbers between commas)"
        )
    if negative or total != options.num_layers:
        raise ConfigError(
            f"layers per stage {[list(stage) for stage in layers]} make {total} layers, the model "
            f"has {options.num_layers}"
        )
    padded = -(-options.vocab_size // (divisible_by * tp)) * divisible_by * tp
    args = args_from_options(
        options,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=len(layers),
        virtual_pipeline_model_parallel_size=len(layers[0]) if len(layers[0]) > 1 else None,
        padded_vocab_size=padded,
        make_vocab_size_divisible_by=divisible_by,
        params_dtype=tensors[WORD_EMBEDDINGS].dtype,
        seq_length=options.max_position_embeddings,
        **{**_ARGS_OF_A_RUN, **(more_args or {})},
    )
    folder = root / RELEASE
    for stage in range(len(layers)):
        states = _stage_states(options, tensors, layers, stage, tp, padded, fused_norms)
        for rank in range(tp):
            suffix = f"_{stage:03d}" if len(layers) > 1 else ""
            content: dict[str, Any] = {
                "args": args,
                "checkpoint_version": _VERSION,
                "iteration": 0,
            }
            chunks = states[rank]
            names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
            content |= dict(zip(names, chunks, strict=True))
            _write(folder / f"mp_rank_{rank:02d}{suffix}" / RANK_FILE, content)
    _write_pointer(root / POINTER)
    return folder


def _write_pointer(path: Path) -> None:
    try:
        replace_file(path, RELEASE.encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def _stage_states(
    options: ModelOptions,
    tensors: Mapping[str, Tensor],
    layers: Sequence[Sequence[int]],
    stage: int,
    tp: int,
    padded: int,
    fused_norms: bool,
) -> list[list[dict[str, Tensor]]]:
    """State dicts of one pipeline rank: `[tensor rank][chunk]`."""
    order = [(chunk, s) for chunk in range(len(layers[0])) for s in range(len(layers))]
    starts, start = {}, 0
    for chunk, s in order:
        starts[chunk, s] = start
        start += layers[s][chunk]
    states: list[list[dict[str, Tensor]]] = [[] for _ in range(tp)]
    for chunk, count in enumerate(layers[stage]):
        own = range(starts[chunk, stage], starts[chunk, stage] + count)
        names = _names_of(options, own, (chunk, stage) == order[0], (chunk, stage) == order[-1])
        for rank_state in states:
            rank_state.append({})
        for name, source in names.items():
            tensor = _padded(source, tensors[source], padded)
            local = renumbered(name, -own.start)
            for rank, part in enumerate(shared_out(name, tensor, tp, options.swiglu)):
                key = fused_name(local) if fused_norms else local
                states[rank][-1][key] = part.contiguous().clone()
    return states


def _names_of(options: ModelOptions, own: range, is_first: bool, is_last: bool) -> dict[str, str]:
    """Parameters of a chunk and what they are made of; the output layer may be a tied copy."""
    names = {}
    for name in options.shapes():
        layer = layer_of(name)
        embeds = name.startswith("embedding.")
        belongs = layer in own if layer is not None else is_first if embeds else is_last
        if belongs:
            names[name] = name
    if is_last and not is_first and not options.untie_embeddings_and_output_weights:
        names["output_layer.weight"] = WORD_EMBEDDINGS
    return names


def _padded(name: str, tensor: Tensor, rows: int) -> Tensor:
    if name not in (WORD_EMBEDDINGS, "output_layer.weight"):
        return tensor
    padding = tensor.new_zeros(rows - tensor.shape[0], tensor.shape[1])
    return torch.cat([tensor, padding])
