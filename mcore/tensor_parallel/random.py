"""Named random states, for users' own layers.

mcore's own dropout is stateless and needs none of this (see docs/numerics.md). The names are
Megatron's; the states belong to the current device, GPU or CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mcore import device
from mcore.errors import ConfigError
from mcore.parallel_state import parallel_context_or_single
from mcore.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)

#: Megatron's name for the state that differs between tensor-parallel ranks.
_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"

#: Megatron's name for the state that is alike on all tensor-parallel ranks.
_DATA_PARALLEL_RNG_TRACKER_NAME = "data-parallel-rng"

#: Megatron's distance between the data-parallel and the tensor-parallel seeds.
_MODEL_PARALLEL_OFFSET = 2718


class CudaRNGStatesTracker:
    """Random states by name; `fork` runs a block under one of them."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def is_initialized(self) -> bool:
        """Whether any state was added."""
        return bool(self.states_)

    def reset(self) -> None:
        """Forget every state."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Tensor]:
        """The states by name, in a new dictionary."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace every state."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state that starts from a seed.

        Raises:
            ConfigError: the name or the seed is in use; two states of one seed would be one stream.
        """
        if seed in self.seeds_:
            raise ConfigError(f"seed {seed} is already used by another random state")
        if name in self.states_:
            raise ConfigError(f"random state {name!r} exists already")
        self.seeds_.add(seed)
        before = device.get_rng_state()
        device.seed_rng(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Run a block under a named state, which moves on; the default state is left as it was.

        Raises:
            ConfigError: there is no state of that name.
        """
        if name not in self.states_:
            known = ", ".join(self.states_) or "none; call model_parallel_cuda_manual_seed first"
            raise ConfigError(f"random state {name!r} does not exist; known: {known}")
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


_TRACKER = CudaRNGStatesTracker()


def get_data_parallel_rng_tracker_name() -> str:
    """Name of the state that is alike on all tensor-parallel ranks."""
    return _DATA_PARALLEL_RNG_TRACKER_NAME


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process."""
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default state alike on all tensor-parallel ranks, and the named states.

    The default state and `data-parallel-rng` (seed itself) are for what is replicated over the
    tensor-parallel group; `model-parallel-rng` (seed + 2718 + tensor-parallel rank) is for what is
    cut over it.
    """
    tp_rank = parallel_context_or_single().tp.rank
    _TRACKER.reset()
    device.seed_rng(seed)
    _TRACKER.add(_DATA_PARALLEL_RNG_TRACKER_NAME, seed)
    _TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + _MODEL_PARALLEL_OFFSET + tp_rank)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Run a function without keeping its activations; backward runs it again.

    Default and named random states are put back for the second run, so dropout repeats bit for bit.

    Args:
        function: called with `args`.
        distribute_saved_activations: keep 1/t of the first argument on each tensor-parallel rank,
            cut along its last dimension; it must be equal on all of them.
        *args: tensors or anything else.

    Comm: none of its own; with distribute_saved_activations one all-gather of the first argument
        forward, and one more as well as one of its gradient backward.
    """
    if distribute_saved_activations:
        group = parallel_context_or_single().tp
        first, *others = args

        def gather_and_run(part: Tensor, *rest: Any) -> Any:
            return function(gather_from_tensor_model_parallel_region(part, group), *rest)

        part = scatter_to_tensor_model_parallel_region(first, group)
        return checkpoint(gather_and_run, False, part, *others)
    replay = _Replay(_TRACKER.get_states())
    return torch_checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), replay)
    )


class _Replay:
    """Named states as they were, while it is entered; more than once where a graph is kept."""

    def __init__(self, states: dict[str, Tensor]) -> None:
        self._states = self._current = states

    def __enter__(self) -> None:
        self._current = _TRACKER.get_states()
        _TRACKER.set_states(self._states)

    def __exit__(self, *error: object) -> None:
        _TRACKER.set_states(self._current)
