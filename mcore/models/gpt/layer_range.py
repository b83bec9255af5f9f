"""Which layers a model chunk holds when its caller does not say."""

from __future__ import annotations

from mcore.config.transformer import TransformerConfig
from mcore.errors import ConfigError
from mcore.parallel_state import parallel_context_or_single


def even_layer_range(config: TransformerConfig, whole: bool, vp_stage: int | None) -> range:
    """All layers of a whole model, or the even share of this pipeline rank and chunk.

    Args:
        config: number of layers.
        whole: the chunk embeds and post-processes, so it is the whole model.
        vp_stage: number of the chunk on its rank, with several.

    Raises:
        ConfigError: the layers cannot be shared out evenly.
    """
    if whole:
        return range(config.num_layers)
    context = parallel_context_or_single()
    chunks = context.virtual_pipeline_model_parallel_size or 1
    stages = context.pp.size * chunks
    if config.num_layers % stages:
        raise ConfigError(
            f"num_layers ({config.num_layers}) must be divisible by pipeline size "
            f"({context.pp.size}) x chunks per rank ({chunks}), or pass layer_range"
        )
    per_stage = config.num_layers // stages
    first = context.placement.stage(context.pp.rank, vp_stage or 0) * per_stage
    return range(first, first + per_stage)
