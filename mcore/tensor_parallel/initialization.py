"""Initial weights that do not depend on how the model is cut.

Stand-alone layers draw the whole matrix from the default generator and keep their part. A model
draws each parameter by name, so that it need not draw what it does not hold.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import init

from mcore.topology.param_sharding import ParamSharding

InitMethod = Callable[[Tensor], object]

#: Rows drawn from one generator; small enough that a rank draws little that it does not keep.
_BLOCK_ROWS = 64


def default_init_method(weight: Tensor) -> Tensor:
    """Xavier-normal over the whole matrix, Megatron's usual choice for stand-alone layers."""
    return init.xavier_normal_(weight)


def init_method_normal(sigma: float) -> InitMethod:
    """An initialiser that fills with normal numbers of deviation `sigma`."""
    return functools.partial(init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> InitMethod:
    """The same for weights that write to the residual stream: sigma / sqrt(multiplier x layers)."""
    return init_method_normal(sigma / math.sqrt(multiplier * num_layers))


@torch.no_grad()
def initialize_slice_(param: Tensor, sharding: ParamSharding, init_method: InitMethod) -> None:
    """Draw the whole parameter on every rank from the default generator, keep this rank's part.

    Padding rows become zero. Every rank has to have the same generator state.
    """
    whole = torch.empty(sharding.global_shape, dtype=param.dtype, device=param.device)
    init_method(whole)
    param.zero_()
    for piece, view in sharding.views(param):
        view.copy_(whole.narrow(sharding.dim, piece.global_start, piece.length))


@torch.no_grad()
def initialize_by_name_(
    param: Tensor, sharding: ParamSharding, *, name: str, seed: int, std: float
) -> None:
    """Fill with normal numbers that are a function of (seed, name, global position) alone.

    Args:
        param: this rank's part; padding rows become zero.
        sharding: where the part lies in the whole.
        name: global parameter name.
        seed: the run's seed.
        std: standard deviation.
    """
    rows, *rest = sharding.global_shape
    param.zero_()
    drawn: dict[int, Tensor] = {}
    for piece, view in sharding.views(param):
        by_rows = sharding.dim == 0
        first = piece.global_start if by_rows else 0
        last = first + piece.length if by_rows else rows
        for block in range(first // _BLOCK_ROWS, (last - 1) // _BLOCK_ROWS + 1):
            begin, end = block * _BLOCK_ROWS, min((block + 1) * _BLOCK_ROWS, rows)
            if block not in drawn:
                drawn = {block: _draw((end - begin, *rest), name, seed, block, std)}
            low, high = max(begin, first), min(end, last)
            values = drawn[block][low - begin : high - begin]
            if not by_rows:
                values = values.narrow(sharding.dim, piece.global_start, piece.length)
            view[low - first : high - first].copy_(values)


def _draw(shape: tuple[int, ...], name: str, seed: int, block: int, std: float) -> Tensor:
    """One block of rows in float32 on the CPU, whose generator is the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
