"""Runs training command lines without starting processes: the adapter of every equivalence test.

A run does what `pretrain_gpt.py` does after its interpreter has started. One process is this one,
without torch.distributed; several are the warm workers of `run_distributed`, from which a run takes
nothing and in which it leaves nothing.
"""

from __future__ import annotations

import json
import logging
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore import parallel_state
from mcore.tensor_parallel.random import get_cuda_rng_tracker
from mcore.testing import preload_in_workers, run_distributed
from mcore.training import checkpointing
from mcore.training.arguments import build_config, parse
from mcore.training.checkpoint_writer import CheckpointWriter
from mcore.training.gpt import datasets_provider, model_provider
from mcore.training.initialize import Launch
from mcore.training.pretrain import Providers, prepare, run
from mcore.training.setup import TrainState
from pretrain_gpt import forward_step

PROVIDERS = Providers(datasets_provider, model_provider, forward_step)
TIMEOUT_SECONDS = 400.0

preload_in_workers(__name__)  # the imports of a training run take seconds

Inspect = Callable[[TrainState], Any]
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    vpp: int | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def flags(self) -> list[str]:
        words = f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp}"
        if self.sp:
            words += " --sequence-parallel"
        if self.vpp is not None:
            words += f" --num-virtual-stages-per-pipeline-rank {self.vpp}"
        return words.split()

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "vpp": self.vpp or 1}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        return "-".join([*parts, *(["sp"] if self.sp else [])]) or "single"


SINGLE = Layout()


def layout_id(value: Any) -> str | None:
    """For `pytest.mark.parametrize(..., ids=layout_id)`."""
    return str(value) if isinstance(value, Layout) else None


def train(
    flags: Sequence[str],
    layout: Layout = SINGLE,
    *,
    records: Path | None = None,
    dtype: torch.dtype | None = None,
    providers: Providers = PROVIDERS,
    device: str = "cpu",
) -> Records:
    """Run a command line at a layout and return what it recorded.

    Args:
        flags: words of the command line, without those of the layout and the record file.
        layout: how to run it.
        records: the record file, where a test goes on with it.
        dtype: type of the parameters, where no flag reaches it (float64).
        providers: model and data; those of pretrain_gpt.py.
        device: cpu or cuda.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "records.jsonl") if records is None else records
        words = [*flags, "--metrics-jsonl", str(path)]
        train_and_inspect(words, layout, dtype=dtype, providers=providers, device=device)
        return read_records(path)


def train_and_inspect(
    flags: Sequence[str],
    layout: Layout = SINGLE,
    inspect: Inspect | None = None,
    *,
    dtype: torch.dtype | None = None,
    providers: Providers = PROVIDERS,
    device: str = "cpu",
) -> list[Any]:
    """Run a command line at a layout and return what `inspect` says on every rank."""
    words = [*flags, *layout.flags, "--device", device]
    work = (words, inspect, dtype, providers)
    if layout.world_size > 1:
        return run_distributed(train_here, layout.world_size, *work, timeout=TIMEOUT_SECONDS)
    return [train_here(*work)]


def save_again(words: list[str], state: TrainState) -> None:
    """For `train_and_inspect` of a run with `--skip-train`: write all of `--load` to `--save`."""
    config, ctx = build_config(parse(words)), state.optimizer.context
    training = replace(config.training, skip_train=False)
    checkpointing.load(state, replace(config, training=training), ctx)
    checkpointing.save(state, config, ctx, CheckpointWriter(config.checkpoint))


def read_records(path: Path) -> Records:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_rates(records: Records) -> Records:
    """Records without what a clock measured (decision 10: identical means equal in the rest)."""
    return [{key: value for key, value in r.items() if key != "seconds"} for r in records]


def series(records: Records, name: str) -> list[float]:
    """One number of each training record."""
    return [record[name] for record in records if name in record]


def largest_difference(first: Records, second: Records, name: str = "lm_loss") -> float:
    pairs = zip(series(first, name), series(second, name), strict=True)
    return max(abs(a - b) for a, b in pairs)


def largest_relative_difference(first: Records, second: Records, name: str = "grad_norm") -> float:
    pairs = zip(series(first, name), series(second, name), strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def train_here(
    words: list[str],
    inspect: Inspect | None = None,
    dtype: torch.dtype | None = None,
    providers: Providers = PROVIDERS,
) -> Any:
    """Run a command line as this rank of the job that this process is in, with all its words."""
    launch = Launch(0, 1, 0)
    if dist.is_initialized():
        launch = Launch(dist.get_rank(), dist.get_world_size(), dist.get_rank())
    with no_traces():
        prepared = prepare(parse(words), launch)
        if dtype is not None:
            model = replace(prepared.config.model, params_dtype=dtype)
            prepared = replace(prepared, config=replace(prepared.config, model=model))
        state = run(prepared, launch, providers)
        return None if inspect is None else inspect(state)


@contextmanager
def no_traces() -> Iterator[None]:
    """Give the process back as it was: log, random states, groups, threads."""
    logger = logging.getLogger("mcore")
    log = (list(logger.handlers), logger.level, logger.propagate)
    tracker = get_cuda_rng_tracker().get_states()
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        get_cuda_rng_tracker().set_states(tracker)
        logger.handlers[:], logger.propagate = log[0], log[2]
        logger.setLevel(log[1])
