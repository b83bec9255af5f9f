"""Loading a checkpoint into the tensors of any layout."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mcore.checkpoint.commit import find_checkpoint
from mcore.checkpoint.metadata import CheckpointMetadata, TensorRecord
from mcore.checkpoint.planner import LoadPlanner
from mcore.checkpoint.rank_local import RankLocal, is_rank_local
from mcore.checkpoint.reader import read_metadata
from mcore.checkpoint.saver import as_sharded
from mcore.checkpoint.shard_reader import ShardReader
from mcore.checkpoint.sharded_tensor import ShardedTensor, whole_tensor
from mcore.checkpoint.storage import ShardLoader
from mcore.checkpoint.together import as_checkpoint_error, process_group, run_together
from mcore.errors import CheckpointError
from mcore.log import get_logger
from mcore.topology.group import Group

#: Gives the key to read a tensor from: its own or another's, out of those that are stored.
Source = Callable[[str, Mapping[str, TensorRecord]], str]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What `load` did.

    Attributes:
        iteration: of the checkpoint.
        common: its JSON state.
        directory: where it lies.
        missing: keys that were asked for and are not in it; empty unless `allow_missing`.
        unexpected: keys in it that no rank read or asked for; state of single ranks counts where
            it was not asked for.
        rank_local: this rank's own tensors by name; None = they were not asked for, there are none
            or they belong to another layout.
    """

    iteration: int
    common: dict[str, Any]
    directory: Path
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    rank_local: dict[str, Tensor] | None


@dataclass(slots=True)
class _Fit:
    """How the wishes of one or all ranks fit the checkpoint; `used` are the keys that are read."""

    wanted: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    misfits: set[str] = field(default_factory=set)


def load(
    root: str | os.PathLike[str],
    tensors: Mapping[str, ShardedTensor | Tensor],
    *,
    iteration: int | None = None,
    source: Source | None = None,
    allow_missing: bool = False,
    partial: Collection[str] = (),
    rank_local: RankLocal | None = None,
    group: Group | dist.ProcessGroup | None = None,
) -> LoadResult:
    """Fill tensors in place from a checkpoint of any layout. Collective.

    Each rank reads what it needs, box by box. No element changes before all ranks have found every
    byte undamaged and every key in place. Floating-point types are converted if they differ.

    Args:
        root: save root, or the directory of one iteration.
        tensors: what this rank holds, by layout-free key.
        iteration: which one; None = the one that the pointer names.
        source: where another key may stand in for one of `tensors`, which of them is read; it has
            to give the same on all ranks.
        allow_missing: leave tensors alone that the checkpoint lacks, and tolerate keys that it has
            beyond those asked for; both are listed in the result. Otherwise either is an error,
            except that whole families (the part before the first dot, such as `exp_avg`) may be
            left unread.
        partial: families of which a part may be left unread.
        rank_local: rank and layout; this rank's own state is read if the layout is the saved one.
        group: ranks that load together; None = all ranks of the job, or this process alone where
            torch.distributed is not initialised.

    Comm: gathers and broadcasts of keys and plans over the group.

    Raises:
        CheckpointError: on every rank, when it fails on one: no such checkpoint, damage (the
            message names the file), keys or shapes that do not fit (all are listed).
    """
    handle = process_group(group)
    directory = Path(run_together(handle, lambda: str(find_checkpoint(root, iteration)))[0])
    found: list[tuple[CheckpointMetadata, dict[str, Tensor]]] = []

    def match() -> _Fit:
        metadata = read_metadata(directory)
        sources = {key: key if source is None else source(key, metadata.tensors) for key in tensors}
        fit = _match(
            metadata, {key: as_sharded(key, value) for key, value in tensors.items()}, sources
        )
        metadata = _with_stand_ins(metadata, sources)
        found.append((metadata, _own_tensors(directory, metadata, rank_local)))
        return fit

    fit = _merge(run_together(handle, match))
    metadata, own = found[0]
    asks_for_own = rank_local is not None
    stored = {key for key in metadata.tensors if not (asks_for_own and is_rank_local(key))}
    unexpected = stored - fit.wanted - fit.used
    _complain(directory, fit, unexpected, partial, allow_missing)
    state = {
        key: as_sharded(key, value) for key, value in tensors.items() if key not in fit.missing
    }
    for key, tensor in own.items():
        state[key] = whole_tensor(key, tensor)
    _report_conversions(metadata, state)
    _dcp_load(state, ShardLoader(directory, metadata), handle)
    for sharded in state.values():
        for view in sharded.padding:
            view.zero_()
    return LoadResult(
        iteration=metadata.iteration,
        common=metadata.common,
        directory=directory,
        missing=tuple(sorted(fit.missing)),
        unexpected=tuple(sorted(unexpected)),
        rank_local=_by_name(own, rank_local),
    )


def _dcp_load(
    state: dict[str, ShardedTensor], reader: ShardLoader, group: dist.ProcessGroup | None
) -> None:
    planner = LoadPlanner()
    try:
        if group is not None:
            dcp.load(state, storage_reader=reader, planner=planner, process_group=group)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise as_checkpoint_error(error) from error


def _match(
    metadata: CheckpointMetadata, wanted: Mapping[str, ShardedTensor], sources: Mapping[str, str]
) -> _Fit:
    fit = _Fit(wanted=set(wanted), used=set(sources.values()))
    for key, tensor in wanted.items():
        record = metadata.tensors.get(sources[key])
        if record is None:
            fit.missing.add(key)
        elif problem := _misfit(record, tensor):
            fit.misfits.add(f"{sources[key]} {problem}")
    return fit


def _with_stand_ins(metadata: CheckpointMetadata, sources: Mapping[str, str]) -> CheckpointMetadata:
    """The metadata as if each key were stored as the one that stands in for it."""
    records = {
        key: metadata.tensors[source]
        for key, source in sources.items()
        if key != source and source in metadata.tensors
    }
    return replace(metadata, tensors=metadata.tensors | records)


def _misfit(record: TensorRecord, tensor: ShardedTensor) -> str | None:
    if record.shape != tuple(tensor.global_shape):
        return f"has shape {list(record.shape)}, not {list(tensor.global_shape)}"
    if record.dtype.is_floating_point != tensor.dtype.is_floating_point:
        return f"is {record.dtype}, not {tensor.dtype}"
    return None


def _merge(fits: list[_Fit]) -> _Fit:
    merged = _Fit()
    for fit in fits:
        merged.wanted |= fit.wanted
        merged.used |= fit.used
        merged.missing |= fit.missing
        merged.misfits |= fit.misfits
    return merged


def _complain(
    directory: Path,
    fit: _Fit,
    unexpected: set[str],
    partial: Collection[str],
    allow_missing: bool,
) -> None:
    """Raise on whatever does not fit; every rank comes to the same conclusion."""
    families = {_family(key) for key in fit.wanted} - {*partial}
    beyond = {key for key in unexpected if _family(key) in families}
    if not fit.misfits and (allow_missing or not (fit.missing or beyond)):
        return
    lines = [f"the checkpoint {directory} does not fit the model:"]
    for title, keys in (
        ("missing in the checkpoint", fit.missing),
        ("in the checkpoint but not in the model", beyond),
        ("different", fit.misfits),
    ):
        if keys:
            lines.append(f"  {title} ({len(keys)}): {', '.join(sorted(keys))}")
    raise CheckpointError("\n".join(lines))


def _report_conversions(metadata: CheckpointMetadata, state: Mapping[str, ShardedTensor]) -> None:
    counts = Counter((metadata.tensors[key].dtype, value.dtype) for key, value in state.items())
    for (stored, wanted), count in counts.items():
        if stored != wanted:
            get_logger().info("%d tensors are converted from %s to %s", count, stored, wanted)


def _family(key: str) -> str:
    return key.partition(".")[0]


def _own_tensors(
    directory: Path, metadata: CheckpointMetadata, rank_local: RankLocal | None
) -> dict[str, Tensor]:
    """Memory for this rank's own state; empty where it was saved at another layout."""
    if rank_local is None or metadata.layout is None:
        return {}
    if metadata.layout != dict(rank_local.layout):
        get_logger().info(
            "state of single ranks (random generators) is not restored: it was saved at layout %s, "
            "this is %s",
            metadata.layout,
            dict(rank_local.layout),
        )
        return {}
    records = {k: v for k, v in metadata.tensors.items() if rank_local.name(k) is not None}
    reader = ShardReader(directory, metadata.files)
    reader.check_sizes(chunk for record in records.values() for chunk in record.chunks)
    return {
        key: torch.empty(record.shape, dtype=record.dtype, device="cpu")
        for key, record in records.items()
    }


def _by_name(own: dict[str, Tensor], rank_local: RankLocal | None) -> dict[str, Tensor] | None:
    if rank_local is None or not own:
        return None
    return {rank_local.name(key) or key: tensor for key, tensor in own.items()}
