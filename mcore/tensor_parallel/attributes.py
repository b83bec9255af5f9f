"""Megatron's attributes of parameters, for users' own layers.

mcore's layers declare a `ParamSharding`, which says more; a parameter that has only these
attributes is understood as an even cut (see `mcore.topology.param_sharding.sharding_of`).
"""

from __future__ import annotations

from torch import Tensor

from mcore.parallel_state import parallel_context_or_single
from mcore.topology.param_sharding import set_tensor_model_parallel_attributes

_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Give a tensor the attributes of a replicated parameter, each where it has none."""
    for name, default in _DEFAULTS.items():
        setattr(tensor, name, tensor.__dict__.get(name, default))


def copy_tensor_model_parallel_attributes(
    destination_tensor: Tensor, source_tensor: Tensor
) -> None:
    """Copy the attributes that the source has, for a copy of a parameter in another dtype."""
    for name in _DEFAULTS:
        if name in source_tensor.__dict__:
            setattr(destination_tensor, name, source_tensor.__dict__[name])


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Whether this rank counts the parameter: it is cut, or this is the group's first rank."""
    if param.__dict__.get("tensor_model_parallel", False):
        return True
    return parallel_context_or_single().tp.is_first


__all__ = [
    "copy_tensor_model_parallel_attributes",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]
