"""What dtype each parameter computes with, where shards are kept wider (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from mcore.errors import ConfigError


def widened(dtype: torch.dtype) -> torch.dtype:
    """What shards of a dtype are kept in: they are the main parameters."""
    return torch.promote_types(dtype, torch.float32)


def compute_dtypes(module: nn.Module) -> dict[nn.Parameter, torch.dtype]:
    """What each parameter computes with; the parameters then get wider storage where it is low."""
    dtypes = {param: param.dtype for param in module.parameters()}
    for param, dtype in dtypes.items():
        if dtype != widened(dtype):
            param.data = param.data.to(widened(dtype))
    return dtypes


def only_dtype(
    params: Sequence[nn.Parameter],
    dtypes: Mapping[nn.Parameter, torch.dtype],
    names: Mapping[nn.Parameter, str],
) -> torch.dtype | None:
    """The dtype that parameters which are gathered together compute with; None if there are none.

    Raises:
        ConfigError: they differ.
    """
    examples = {dtypes[param]: names[param] for param in params}
    if len(examples) > 1:
        listed = [f"{n} in {str(d).removeprefix('torch.')}" for d, n in examples.items()]
        raise ConfigError(
            "optim_grads_params gathers parameters together that compute in different dtypes: "
            f"{', '.join(listed)}. Give all parameters of a layer, and all small ones outside of "
            "layers, one dtype, or use another sharding strategy"
        )
    return next(iter(examples), None)
