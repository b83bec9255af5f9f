"""A model out of a checkpoint of any layout, whole in this process or spread over ranks."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from mcore.checkpoint import CheckpointReader, ShardedTensor, load, sharded_parameter
from mcore.errors import CheckpointError
from mcore.models.gpt import GPTModel
from mcore.topology.context import ParallelContext
from mcore.topology.param_sharding import global_named_parameters, sharding_of
from mcore.topology.stages import balanced_split, stage_layers
from mcore.training.arguments import build_config, parse


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to use.

    Attributes:
        model: this rank's part, in evaluation mode.
        options: what defines it, as the checkpoint says, by option name.
        directory: where it was.
    """

    model: GPTModel
    options: dict[str, Any]
    directory: str


def load_model(
    path: str | os.PathLike[str],
    iteration: int | None = None,
    device: torch.device | str = "cpu",
    *,
    ctx: ParallelContext | None = None,
    bf16: bool = False,
) -> LoadedModel:
    """Build the model that a checkpoint describes, or this rank's part of it, and fill it.

    Args:
        path: save root, or the directory of one iteration.
        iteration: which one; None = the one that the pointer names.
        device: where the model lives.
        ctx: groups that the model is spread over, in any layout; None = whole in this process.
        bf16: parameters in bfloat16 rather than float32.

    Comm: with a context see `mcore.checkpoint.load`; every rank of the job has to call it.

    Raises:
        CheckpointError: no such checkpoint, it does not describe its model, or it is damaged.
        ConfigError: the model cannot be spread over so many ranks.
    """
    reader = CheckpointReader(path, iteration)
    options = reader.common.get("model")
    if not isinstance(options, dict):
        raise CheckpointError(f"{reader.directory} does not say how its model is built")
    context = ParallelContext.single() if ctx is None else ctx
    model = _build(options, str(reader.directory), context, bf16)
    wanted: dict[str, ShardedTensor] = {}
    for name, param in global_named_parameters(model):
        key = f"model.{name}"
        sharded = sharded_parameter(key, param, sharding_of(param, context.tp), for_save=False)
        wanted[key] = wanted[key].joined(sharded) if key in wanted else sharded
    # Without torch.distributed a group has no handle, and this process loads by itself.
    load(reader.directory, wanted, group=context.mp if context.mp.handle is None else None)
    return LoadedModel(model.to(device).eval(), options, str(reader.directory))


def _build(options: dict[str, Any], directory: str, ctx: ParallelContext, bf16: bool) -> GPTModel:
    words = [f"--tensor-model-parallel-size={ctx.tp.size}"]
    words += [f"--pipeline-model-parallel-size={ctx.pp.size}"]
    config = build_config(parse([*words, "--bf16"] if bf16 else words), options)
    vocab_size, positions = config.tokenizer.vocab_size, config.max_positions
    if vocab_size is None or positions is None:
        raise CheckpointError(
            f"{directory} does not say vocab_size and max_position_embeddings of its model"
        )
    split = balanced_split(config.model.num_layers, ctx.placement, 0.0, 0.0)
    return GPTModel(
        dataclasses.replace(config.model, perform_initialization=False),
        vocab_size=vocab_size,
        max_sequence_length=positions,
        pre_process=ctx.pp.is_first,
        post_process=ctx.pp.is_last,
        parallel_output=False,
        share_embeddings_and_output_weights=not config.gpt.untie_embeddings_and_output_weights,
        position_embedding_type=config.gpt.position_embedding_type,
        rotary_percent=config.gpt.rotary_percent,
        rotary_base=config.gpt.rotary_base,
        rotary_scaling=config.gpt.rotary_scaling,
        layer_range=stage_layers(split, ctx.pp.rank),
        tp_group=ctx.tp,
    )
