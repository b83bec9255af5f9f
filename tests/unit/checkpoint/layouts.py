"""A few parameters cut by hand for any tensor-parallel size, and their global values."""

import torch

from mcore.checkpoint import sharded_parameter
from mcore.topology.group import Group
from mcore.topology.param_sharding import ParamSharding, Piece, replicated_sharding

VOCAB, HIDDEN, HEAD = 997, 12, 3
QUERY_HEADS, QUERY_GROUPS = 4, 2


def group_of(size, index):
    return Group("tp", tuple(range(size)), index, None if size == 1 else object())


def even_sharding(shape, dim, group, blocks=1, used=None):
    block = shape[dim] // blocks
    rows = block // group.size
    limit = shape[dim] if used is None else used
    pieces = []
    for i in range(blocks):
        start = i * block + group.rank * rows
        if start < limit:
            pieces.append(Piece(i * rows, start, min(rows, limit - start)))
    shape = tuple(limit if d == dim else size for d, size in enumerate(shape))
    return ParamSharding(shape, dim, tuple(pieces))


def qkv_sharding(group):
    """Rows [q q k v] per query group; with fewer groups than ranks each rank has its own query
    heads and a copy of the group's key and value."""
    per_group = QUERY_HEADS // QUERY_GROUPS
    rows = (per_group + 2) * HEAD
    shape = (QUERY_GROUPS * rows, HIDDEN)
    if group.size <= QUERY_GROUPS:
        return even_sharding(shape, 0, group)
    replicas = group.size // QUERY_GROUPS
    block, part = divmod(group.rank, replicas)
    q_rows = per_group // replicas * HEAD
    start = block * rows
    pieces = (
        Piece(0, start + part * q_rows, q_rows),
        Piece(q_rows, start + per_group * HEAD, 2 * HEAD, is_owner=part == 0, is_shared=True),
    )
    return ParamSharding(shape, 0, pieces)


def shardings(group):
    padded = -(-VOCAB // (8 * group.size)) * 8 * group.size
    return {
        "embedding": even_sharding((padded, HIDDEN), 0, group, used=VOCAB),
        "qkv": qkv_sharding(group),
        "fc1": even_sharding((32, HIDDEN), 0, group, blocks=2),
        "fc1.bias": even_sharding((32,), 0, group, blocks=2),
        "fc2": even_sharding((HIDDEN, 16), 1, group),
        "norm": replicated_sharding((HIDDEN,), group),
        "scale": replicated_sharding((), group),
    }


def local_shape(name, sharding, group):
    shape = list(sharding.global_shape)
    if sharding.tp_dim is not None:
        shape[sharding.tp_dim] = sum(piece.length for piece in sharding.pieces)
    if name == "embedding":
        shape[0] = -(-VOCAB // (8 * group.size)) * 8
    return shape


def global_values():
    values, start = {}, 0
    for name, sharding in shardings(group_of(1, 0)).items():
        count = torch.Size(sharding.global_shape).numel()
        values[name] = torch.arange(start, start + count, dtype=torch.float64)
        values[name] = values[name].reshape(sharding.global_shape)
        start += count
    return values


def cut(values, group):
    """Local tensors of a rank, by plain indexing; padding holds rubbish."""
    out = {}
    for name, sharding in shardings(group).items():
        local = torch.full(local_shape(name, sharding, group), -777.0, dtype=values[name].dtype)
        for piece in sharding.pieces:
            there = slice(piece.global_start, piece.global_start + piece.length)
            here = slice(piece.local_start, piece.local_start + piece.length)
            if local.dim() == 0:
                local.copy_(values[name])
            elif sharding.dim == 0:
                local[here] = values[name][there]
            else:
                local[:, here] = values[name][:, there]
        out[name] = local
    return out


def sharded(local, group, for_save):
    return {
        f"model.{name}": sharded_parameter(
            f"model.{name}", local[name], sharding, for_save=for_save
        )
        for name, sharding in shardings(group).items()
    }


def joined(parts):
    """The parts of all ranks, as one process would hold them."""
    out = dict(parts[0])
    for part in parts[1:]:
        out = {key: out[key].joined(part[key]) for key in out}
    return out
