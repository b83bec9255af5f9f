"""The one place that reads a user's own configuration object, such as Megatron's.

Our configurations are plain data and always complete. A user's object may carry callables and may
lack any attribute, so it is read by name here, at the edge, and turned into what the executor
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mcore.errors import ConfigError
from mcore.pipeline_parallel.hooks import ScheduleHooks
from mcore.pipeline_parallel.p2p_communication import TensorSpec
from mcore.topology.context import ParallelContext


@runtime_checkable
class HasNoSync(Protocol):
    """A wrapper that reduces gradients and can hold that back: ours, and torch's own DDP."""

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which gradients are accumulated and not reduced."""


def config_of(chunk: nn.Module) -> Any | None:
    """The `config` of a chunk or of what its wrappers hold; None where there is none."""
    module: nn.Module | None = chunk
    found = None
    while module is not None:
        found = _read(module, "config") or found
        module = dict(module.named_children()).get("module")
    return found


def default_hooks(chunks: Sequence[nn.Module]) -> ScheduleHooks:
    """The hooks of a call that names none: from the chunks' config and from their wrappers."""
    return hooks_from_config(config_of(chunks[0]), chunks)


def hooks_from_config(config: Any, chunks: Sequence[nn.Module]) -> ScheduleHooks:
    """Hooks that call what Megatron's configuration objects carry.

    Args:
        config: an object with any of no_sync_func, grad_sync_func, param_sync_func (a callable, or
            a list with one a chunk), finalize_model_grads_func and grad_scale_func; None for none
            of them.
        chunks: this rank's model chunks.

    Returns:
        Hooks with Megatron's calls: `no_sync_func()`, `grad_sync_func(parameters)`,
        `param_sync_func(parameters)`, `finalize_model_grads_func(chunks, num_tokens)`,
        `grad_scale_func(loss)`. num_tokens is always a tensor, see `ScheduleHooks.finalize_grads`:
        what loss_func returns, not calculate_per_token_loss, says whether the loss is a sum.
        Without a no_sync_func, chunks with a `no_sync` method (DDP) are asked themselves.
    """
    given: dict[str, Any] = {}
    no_sync = _per_chunk(_read(config, "no_sync_func"), chunks)
    if no_sync is None and all(isinstance(chunk, HasNoSync) for chunk in chunks):
        no_sync = [chunk.no_sync for chunk in chunks if isinstance(chunk, HasNoSync)]
    if no_sync is not None:
        given["no_sync"] = _enter(no_sync)
    for hook, name in (
        ("start_grad_sync", "grad_sync_func"),
        ("start_param_sync", "param_sync_func"),
    ):
        functions = _per_chunk(_read(config, name), chunks)
        if functions is not None:
            given[hook] = _with_parameters(functions, chunks)
    finalize = _read(config, "finalize_model_grads_func")
    if finalize is not None:
        given["finalize_grads"] = _finalize(finalize, chunks)
    scale = _read(config, "grad_scale_func")
    if scale is not None:
        given["scale_loss"] = scale
    return ScheduleHooks(**given)


def microbatch_group_size(config: Any) -> int | None:
    """microbatch_group_size_per_vp_stage, or None for the default."""
    size: int | None = _read(config, "microbatch_group_size_per_vp_stage")
    return size


def stage_specs(
    chunks: Sequence[nn.Module],
    ctx: ParallelContext,
    sizes: tuple[int, int],
    *,
    tensor_shape: Sequence[int] | Sequence[Sequence[int]] | None,
    dtype: torch.dtype | Sequence[torch.dtype] | None,
) -> tuple[TensorSpec, ...] | None:
    """What travels between stages; None where it varies.

    Args:
        chunks: this rank's model chunks; the first one's config is read where nothing is given.
        ctx: for the sizes of the groups.
        sizes: (sequence length, micro batch size).
        tensor_shape: one shape, or one a tensor.
        dtype: one dtype for all, or one a tensor.

    Raises:
        ConfigError: nothing says the shape or the dtype.
    """
    config = config_of(chunks[0])
    if tensor_shape is None:
        if _read(config, "variable_seq_lengths"):
            return None
        tensor_shape = stage_tensor_shape(config, ctx, *sizes)
    shapes = [tuple(size) for size in tensor_shape if not isinstance(size, int)]
    if not shapes:
        shapes = [tuple(size for size in tensor_shape if isinstance(size, int))]
    if dtype is None:
        dtype = stage_dtype(config, chunks)
    dtypes = [dtype] * len(shapes) if isinstance(dtype, torch.dtype) else list(dtype)
    if len(dtypes) != len(shapes):
        raise ConfigError(f"{len(dtypes)} dtypes were given for {len(shapes)} tensor shapes")
    return tuple(TensorSpec(*pair) for pair in zip(shapes, dtypes, strict=True))


def stage_tensor_shape(
    config: Any, ctx: ParallelContext, seq_length: int, micro_batch_size: int
) -> tuple[int, int, int]:
    """The shape that travels between the stages of a transformer: [s/(c t), b, h].

    Args:
        config: with hidden_size, and sequence_parallel where the sequence is split over tp ranks.
        ctx: for the sizes c and t; t counts only with sequence_parallel.
        seq_length: s.
        micro_batch_size: b.

    Raises:
        ConfigError: the config does not say hidden_size, or s does not divide.
    """
    hidden_size = _read(config, "hidden_size")
    if hidden_size is None:
        raise ConfigError(
            "the shape of the tensors between pipeline stages is unknown: the model has no "
            "config.hidden_size; pass tensor_shape= to the schedule"
        )
    parts = ctx.cp.size * (ctx.tp.size if _read(config, "sequence_parallel") else 1)
    if seq_length % parts:
        raise ConfigError(
            f"seq_length ({seq_length}) must be divisible by {parts}: context parallel size "
            f"{ctx.cp.size} x tensor parallel size {ctx.tp.size} under sequence parallelism"
        )
    return seq_length // parts, micro_batch_size, int(hidden_size)


def stage_dtype(config: Any, chunks: Sequence[nn.Module]) -> torch.dtype:
    """The dtype that travels between stages: config.pipeline_dtype, or that of the parameters.

    Raises:
        ConfigError: neither says.
    """
    dtype = _read(config, "pipeline_dtype")
    if dtype is None:
        dtype = next((p.dtype for chunk in chunks for p in chunk.parameters()), None)
    if dtype is None:
        dtype = _read(config, "params_dtype")
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            "the dtype of the tensors between pipeline stages is unknown: this rank's model has no "
            "parameters; pass dtype= to the schedule"
        )
    return dtype


def _read(config: Any, name: str) -> Any | None:
    return getattr(config, name, None)


def _per_chunk(value: Any, chunks: Sequence[nn.Module]) -> list[Callable[..., Any]] | None:
    if value is None:
        return None
    functions = list(value) if isinstance(value, (list, tuple)) else [value] * len(chunks)
    if len(functions) != len(chunks):
        raise ConfigError(f"{len(functions)} functions were given for {len(chunks)} model chunks")
    return functions


def _enter(functions: list[Callable[..., Any]]) -> Callable[[int], AbstractContextManager[None]]:
    def no_sync(chunk: int) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = functions[chunk]()
        return context

    return no_sync


def _with_parameters(
    functions: list[Callable[..., Any]], chunks: Sequence[nn.Module]
) -> Callable[[int], None]:
    def start(chunk: int) -> None:
        functions[chunk](chunks[chunk].parameters())

    return start


def _finalize(
    function: Callable[..., Any], chunks: Sequence[nn.Module]
) -> Callable[[Tensor], None]:
    def finalize(num_tokens: Tensor) -> None:
        function(list(chunks), num_tokens)

    return finalize
