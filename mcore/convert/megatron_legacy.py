"""Megatron-LM's `torch` checkpoints: one pickle a model-parallel rank. In and out.

Source: the folders that Megatron-LM writes. Nothing in the pickles is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore.convert.megatron_args import args_from_options, options_from_args
from mcore.convert.megatron_names import (
    canonical_name,
    flat_tensors,
    fused_name,
    layer_of,
    merged,
    modern_qkv,
    renumbered,
    shared_out,
)
from mcore.convert.model_options import ModelOptions, check_shapes
from mcore.convert.safe_pickle import load_torch_file
from mcore.errors import CheckpointError, ConfigError

POINTER = "latest_checkpointed_iteration.txt"
_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
_VERSION = 3.0


def iteration_folder(root: Path) -> Path:
    """The folder of the iteration that a save root's pointer names, or the path itself.

    Raises:
        CheckpointError: the pointer names nothing.
    """
    pointer = root / POINTER
    if not pointer.is_file():
        return root
    text = pointer.read_text(encoding="utf-8").strip()
    if not re.fullmatch(r"[0-9]{1,18}|release", text):
        raise CheckpointError(f"{pointer} holds {text[:40]!r}, not an iteration number")
    folder = root / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise CheckpointError(f"{pointer} names {text}, and there is no folder {folder}")
    return folder


def read_legacy(
    path: str | os.PathLike[str], vocab_size: int | None = None
) -> tuple[ModelOptions, dict[str, Tensor]]:
    """The model in a folder of `mp_rank_TT[_PPP]/model_optim_rng.pt`.

    Args:
        path: save root, or the folder of one iteration.
        vocab_size: token ids that exist; the rest of the rows is padding.

    Returns:
        Its options, and its parameters by our name, whole.

    Raises:
        CheckpointError: damage, ranks that do not fit together, or a pickle that names what is not
            data.
        UnsupportedError: a model that mcore does not compute.
    """
    folder = iteration_folder(Path(path))
    ranks = _ranks(folder)
    first = load_torch_file(ranks[0, 0], str(ranks[0, 0]))
    options = options_from_args(_member(first, "args", ranks[0, 0]), vocab_size)
    tp, pp = (max(place[i] for place in ranks) + 1 for i in (0, 1))
    columns = [
        [_chunks(ranks[t, p], options, tp) for t in range(tp)]  # one pipeline stage
        for p in range(pp)
    ]
    tensors = _joined_stages(columns, options)
    return options, as_model(options, tensors)


def _ranks(folder: Path) -> dict[tuple[int, int], Path]:
    found: dict[tuple[int, int], Path] = {}
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = _RANK.fullmatch(entry.name)
        if match and (entry / _FILE).is_file():
            found[int(match.group(1)), int(match.group(2) or 0)] = entry / _FILE
    if not found:
        raise CheckpointError(f"{folder} holds no mp_rank_*/{_FILE}")
    sizes = [max(place[i] for place in found) + 1 for i in (0, 1)]
    absent = [(t, p) for t in range(sizes[0]) for p in range(sizes[1]) if (t, p) not in found]
    if absent:
        raise CheckpointError(f"{folder} lacks the (tensor, pipeline) ranks {absent}")
    return found


def _member(content: Any, name: str, path: Path) -> Any:
    if not isinstance(content, Mapping) or name not in content:
        raise CheckpointError(f"{path} holds no {name!r}: it is no checkpoint of Megatron-LM")
    return content[name]


def _chunks(path: Path, options: ModelOptions, tp: int) -> list[dict[str, Tensor]]:
    """The model chunks of one rank, by our names with the chunk's own layer numbers."""
    content = load_torch_file(path, str(path))
    names = ["model"]
    if isinstance(content, Mapping) and "model" not in content:
        names = sorted(
            (key for key in content if re.fullmatch(r"model\d+", str(key))),
            key=lambda key: int(key[5:]),
        ) or ["model"]
    version = float(content.get("checkpoint_version", 0))
    chunks = []
    for name in names:
        state = dict(flat_tensors(_member(content, name, path)))
        chunk = {canonical_name(key): tensor for key, tensor in state.items()}
        for key in chunk:
            if ".linear_qkv." in key:
                chunk[key] = modern_qkv(chunk[key], version, options.num_attention_heads // tp)
        chunks.append(chunk)
    return chunks


def _joined_stages(
    columns: Sequence[Sequence[Sequence[Mapping[str, Tensor]]]], options: ModelOptions
) -> dict[str, Tensor]:
    """Whole parameters of `columns[pipeline rank][tensor rank][chunk]`."""
    whole: dict[str, Tensor] = {}
    offset = 0
    for chunk in range(len(columns[0][0])):
        for stage in columns:
            parts = [rank[chunk] for rank in stage]
            layers = {layer_of(name) for name in parts[0]} - {None}
            for name in parts[0]:
                try:
                    tensor = merged(name, [part[name] for part in parts], options.swiglu)
                except (KeyError, RuntimeError) as error:
                    raise CheckpointError(f"tensor-parallel ranks do not fit: {name}") from error
                whole[renumbered(name, offset)] = tensor
            offset += len(layers)
    return whole


def as_model(options: ModelOptions, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters without padding and without the copy of a tied embedding."""
    tensors = dict(tensors)
    if not options.untie_embeddings_and_output_weights:
        copy = tensors.pop("output_layer.weight", None)
        if copy is not None and not torch.equal(copy, tensors[_WORD_EMBEDDINGS]):
            raise CheckpointError("the tied output layer differs from the embedding")
    for name in (_WORD_EMBEDDINGS, "output_layer.weight"):
        if name in tensors:
            tensors[name] = tensors[name][: options.vocab_size].contiguous()
    check_shapes(options, tensors)
    return tensors


def write_legacy(
    options: ModelOptions,
    tensors: Mapping[str, Tensor],
    root: Path,
    *,
    tp: int = 1,
    layers: Sequence[Sequence[int]] = (),
    iteration: int = 0,
    divisible_by: int = 128,
    fused_norms: bool = False,
) -> Path:
    """Write a folder that Megatron-LM loads with `--ckpt-format torch`.

    Args:
        options: of the model.
        tensors: its parameters by our name, whole.
        root: save root to write.
        tp: tensor-parallel size.
        layers: `layers[pipeline rank][chunk]`, number of layers; one stage with all when empty.
        iteration: its number.
        divisible_by: rows of the vocabulary on each rank are a multiple of this.
        fused_norms: use the norms' names of transformer-engine.

    Returns:
        The folder of the iteration.

    Raises:
        CheckpointError: it cannot be cut like that, or the disk is full.
        ConfigError: the layers do not add up.
    """
    layers = layers or [[options.num_layers]]
    total = sum(map(sum, layers))
    if total != options.num_layers or len({len(stage) for stage in layers}) != 1:
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
        iteration=iteration,
        seq_length=options.max_position_embeddings,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        params_dtype=tensors[_WORD_EMBEDDINGS].dtype,
    )
    folder = root / f"iter_{iteration:07d}"
    for stage in range(len(layers)):
        states = _stage_states(options, tensors, layers, stage, tp, padded, fused_norms)
        for rank in range(tp):
            suffix = f"_{stage:03d}" if len(layers) > 1 else ""
            content: dict[str, Any] = {
                "args": args,
                "checkpoint_version": _VERSION,
                "iteration": iteration,
            }
            chunks = states[rank]
            names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
            content |= dict(zip(names, chunks, strict=True))
            _write(folder / f"mp_rank_{rank:02d}{suffix}" / _FILE, content)
    (root / POINTER).write_text(str(iteration), encoding="utf-8")
    return folder


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
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
        names["output_layer.weight"] = _WORD_EMBEDDINGS
    return names


def _padded(name: str, tensor: Tensor, rows: int) -> Tensor:
    if name not in (_WORD_EMBEDDINGS, "output_layer.weight"):
        return tensor
    padding = tensor.new_zeros(rows - tensor.shape[0], tensor.shape[1])
    return torch.cat([tensor, padding])
