"""Parts of a model that are gathered, or waited for, as one: layers, and what lies around them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def param_units(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """The model's units in order of registration, each with all its parameters.

    A member of a `ModuleList` is a unit, and so is every other module without such a list inside.
    A module that contains one is taken apart; parameters of its own go by themselves.
    """
    if not _has_list(module):
        params = list(module.parameters())
        if params:
            yield module, params
        return
    own = list(module.parameters(recurse=False))
    if own:
        yield module, own
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            for member in child:
                yield member, list(member.parameters())
        else:
            yield from param_units(child)


def _has_list(module: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList) for child in module.modules())
