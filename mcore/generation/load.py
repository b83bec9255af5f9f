"""A model out of a checkpoint of any layout, whole, in this process."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from mcore.checkpoint import CheckpointReader
from mcore.errors import CheckpointError
from mcore.models.gpt import GPTModel
from mcore.topology.param_sharding import global_named_parameters
from mcore.training.arguments import build_config, parse

_PREFIX = "model."


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to use.

    Attributes:
        model: in evaluation mode, float32.
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
) -> LoadedModel:
    """Build the model that a checkpoint describes and fill it.

    Args:
        path: save root, or the directory of one iteration.
        iteration: which one; None = the one that the pointer names.
        device: where the model lives.

    Raises:
        CheckpointError: no such checkpoint, it does not describe its model, or it is damaged.
    """
    reader = CheckpointReader(path, iteration)
    options = reader.common.get("model")
    if not isinstance(options, dict):
        raise CheckpointError(f"{reader.directory} does not say how its model is built")
    model = _build(options, str(reader.directory))
    _fill(model, reader)
    return LoadedModel(model.to(device).eval(), options, str(reader.directory))


def _build(options: dict[str, Any], directory: str) -> GPTModel:
    config = build_config(parse([]), options)
    vocab_size, positions = config.tokenizer.vocab_size, config.max_positions
    if vocab_size is None or positions is None:
        raise CheckpointError(
            f"{directory} does not say vocab_size and max_position_embeddings of its model"
        )
    return GPTModel(
        dataclasses.replace(config.model, perform_initialization=False),
        vocab_size=vocab_size,
        max_sequence_length=positions,
        parallel_output=False,
        share_embeddings_and_output_weights=not config.gpt.untie_embeddings_and_output_weights,
        position_embedding_type=config.gpt.position_embedding_type,
        rotary_percent=config.gpt.rotary_percent,
        rotary_base=config.gpt.rotary_base,
        rotary_scaling=config.gpt.rotary_scaling,
    )


def _fill(model: GPTModel, reader: CheckpointReader) -> None:
    expected = {_PREFIX + name: param for name, param in global_named_parameters(model)}
    stored = {key for key in reader.keys() if key.startswith(_PREFIX)}  # noqa: SIM118
    if stored != expected.keys():
        odd = sorted(stored ^ expected.keys())
        raise CheckpointError(
            f"the parameters in {reader.directory} are not those of the model that it describes: "
            f"{', '.join(odd[:4])}{' ...' if len(odd) > 4 else ''}"
        )
    for key, param in expected.items():
        tensor = reader.tensor(key)
        if tensor.shape != param.shape:
            raise CheckpointError(
                f"{key} in {reader.directory} has shape {tuple(tensor.shape)}; the model that it "
                f"describes has {tuple(param.shape)}"
            )
        with torch.no_grad():
            param.copy_(tensor)
