"""Sizes of the parallel axes and how parallel layers behave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mcore.config.fields import below, flag, refuse
from mcore.config.megatron_names import accepts_megatron_names


@accepts_megatron_names
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParallelConfig:
    """What a parallel layer has to know; a stand-alone layer takes the defaults.

    Raises:
        ConfigError: a size below 1.
    """

    tensor_model_parallel_size: int = flag(
        1, help="Ranks that share each layer (tensor parallelism)."
    )
    pipeline_model_parallel_size: int = flag(1, help="Ranks that share the layers out (pipeline).")
    virtual_pipeline_model_parallel_size: int | None = flag(
        None,
        name="--num-virtual-stages-per-pipeline-rank",
        help="Model chunks on each pipeline rank (interleaved schedule).",
    )
    context_parallel_size: int = flag(1, help="Ranks that share each sequence; only 1 works today.")
    sequence_parallel: bool = flag(
        False,
        help="Split norms, dropout and residuals along the sequence over tensor-parallel ranks.",
    )
    use_tp_pp_dp_mapping: bool = flag(
        False,
        help="Rank order tp-cp-pp-dp instead of tp-cp-dp-pp: pipelines of neighbouring ranks.",
    )
    params_dtype: torch.dtype = flag(
        torch.float32, hidden=True, help="Data type of the parameters."
    )
    perform_initialization: bool = flag(
        True, hidden=True, help="Draw initial weights when a layer is built."
    )
    gradient_accumulation_fusion: bool = flag(
        True,
        name="--gradient-accumulation-fusion",
        help="Let the matrix product that makes a weight gradient add it to the accumulated one.",
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from below(
            self,
            1,
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "virtual_pipeline_model_parallel_size",
        )

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one replica of the model: tensor x pipeline x context."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    @property
    def order(self) -> str:
        """Rank order of the process groups, fastest axis first."""
        return "tp-cp-pp-dp" if self.use_tp_pp_dp_mapping else "tp-cp-dp-pp"

    @property
    def pipeline_dtype(self) -> torch.dtype:
        """Data type of what travels between stages."""
        return self.params_dtype
