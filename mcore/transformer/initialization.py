"""Initialisers of the transformer's weights."""

from __future__ import annotations

from functools import partial

from torch.nn import init

from mcore.tensor_parallel.initialization import InitMethod


def normal(std: float) -> InitMethod:
    """Fills a tensor with normal numbers of mean 0 and the given deviation."""
    return partial(init.normal_, mean=0.0, std=std)
