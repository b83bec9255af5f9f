"""Megatron-LM's `torch` checkpoints: one pickle a model-parallel rank, read.

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

from mcore.convert.megatron_args import options_from_args
from mcore.convert.megatron_names import (
    canonical_name,
    flat_tensors,
    layer_of,
    merged,
    modern_qkv,
    renumbered,
)
from mcore.convert.model_options import ModelOptions, check_shapes
from mcore.convert.safe_pickle import load_torch_file
from mcore.errors import CheckpointError

POINTER = "latest_checkpointed_iteration.txt"
#: What a pointer says of weights without an iteration.
RELEASE = "release"
RANK_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


def read_pointer(path: Path) -> str:
    """What a file names that says which part of a save root is the newest.

    Raises:
        CheckpointError: it cannot be read, or it is no text.
    """
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def iteration_folder(root: Path) -> Path:
    """The folder of the iteration that a save root's pointer names, or the path itself.

    Raises:
        CheckpointError: the pointer names nothing.
    """
    pointer = root / POINTER
    if not pointer.is_file():
        return root
    text = read_pointer(pointer)
    if not re.fullmatch(rf"[0-9]{{1,18}}|{RELEASE}", text):
        raise CheckpointError(f"{pointer} holds {text[:40]!r}, not an iteration number")
    folder = root / (text if text == RELEASE else f"iter_{int(text):07d}")
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
        if match and (entry / RANK_FILE).is_file():
            found[int(match.group(1)), int(match.group(2) or 0)] = entry / RANK_FILE
    if not found:
        raise CheckpointError(f"{folder} holds no mp_rank_*/{RANK_FILE}")
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
        if copy is not None and not torch.equal(copy, tensors[WORD_EMBEDDINGS]):
            raise CheckpointError("the tied output layer differs from the embedding")
    for name in (WORD_EMBEDDINGS, "output_layer.weight"):
        if name in tensors:
            tensors[name] = tensors[name][: options.vocab_size].contiguous()
    check_shapes(options, tensors)
    return tensors
