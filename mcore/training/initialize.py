"""From a configuration to a process that knows its place: device, process groups, seeds, log."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from mcore import parallel_state
from mcore.config.run import RunConfig
from mcore.device import backend_name, pick_device
from mcore.errors import ConfigError
from mcore.log import configure, get_logger, warn_ignored
from mcore.tensor_parallel.random import model_parallel_cuda_manual_seed
from mcore.topology.context import ParallelContext
from mcore.training.pipeline_plan import PipelinePlan, plan_pipeline


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher (torchrun, or nobody) says about this process.

    Attributes:
        rank: number of this process in the job.
        world_size: processes in the job.
        local_rank: number of this process on its machine.
    """

    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where this process computes and with whom.

    Attributes:
        ctx: parallel groups.
        device: where its tensors live.
        owns_world: this run initialised torch.distributed and ends it.
        pipeline: schedule and stage placement.
    """

    ctx: ParallelContext
    device: torch.device
    owns_world: bool
    pipeline: PipelinePlan

    @property
    def is_writer(self) -> bool:
        """Whether this process writes logs and records."""
        return self.ctx.rank == 0


def read_launch(local_rank: int | None = None) -> Launch:
    """Read RANK, WORLD_SIZE and LOCAL_RANK; without them this is the only process.

    Args:
        local_rank: from a launcher that passes it as a flag; LOCAL_RANK wins.

    Raises:
        ConfigError: some of the variables are set and others are not.
    """
    names = ("RANK", "WORLD_SIZE")
    present = [name for name in names if name in os.environ]
    if not present:
        return Launch(0, 1, local_rank or 0)
    if len(present) < len(names):
        raise ConfigError(f"{present[0]} is set but not all of {', '.join(names)}; use torchrun")
    local = os.environ.get("LOCAL_RANK", local_rank if local_rank is not None else 0)
    return Launch(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(local))


def initialize(config: RunConfig, launch: Launch) -> Runtime:
    """Join the job.

    Comm: creates the default process group (only with several processes) and the parallel groups.

    Raises:
        ConfigError: a device or backend that is not there.
        TopologyError: sizes that do not fit the world.
    """
    configure(launch.rank, launch.world_size)
    device = pick_device(config.runtime.device, launch.local_rank)
    backend = config.runtime.distributed_backend or backend_name(device)
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError("distributed_backend is nccl but the device is the CPU; use gloo")
    minutes = config.runtime.distributed_timeout_minutes
    _choose_kernels(config.runtime.deterministic_mode)
    owns_world = launch.world_size > 1 and not dist.is_initialized()
    if owns_world:
        _join_world(backend, timedelta(minutes=minutes))
    model, pipeline = config.model, plan_pipeline(config)
    ctx = parallel_state.initialize_model_parallel(
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        pipeline.virtual_size,
        context_parallel_size=model.context_parallel_size,
        order=model.order,
        stage_placement=pipeline.placement,
        distributed_timeout_minutes=minutes,
    )
    seed_everything(config.training.seed, ctx)
    get_logger().info(
        "%d processes on %s (%s): tensor %d x pipeline %d x data %d",
        launch.world_size,
        device,
        backend if launch.world_size > 1 else "no process group",
        ctx.tp.size,
        ctx.pp.size,
        ctx.dp.size,
    )
    if ctx.pp.size > 1:
        get_logger().info("pipeline schedule: %s", pipeline.schedule.name)
    elif config.pipeline.pipeline_schedule is not None:
        warn_ignored("--pipeline-schedule", "there is one pipeline rank")
    return Runtime(ctx, device, owns_world, pipeline)


def _choose_kernels(deterministic: bool) -> None:
    if deterministic:  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def _join_world(backend: str, timeout: timedelta) -> None:
    """Create the default group, under names of this attempt's own.

    torchrun keeps one store for all attempts of an elastic job: without that, a restarted rank may
    read the addresses of ranks that have ended, and fail to connect to them.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"attempt {attempt} of {size} ranks", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )


def seed_everything(seed: int, ctx: ParallelContext) -> None:
    """Seed Python, NumPy and torch, for users' own layers; mcore's own numbers need none of it.

    The offset of 100 per pipeline rank is Megatron's.
    """
    base = seed + 100 * ctx.pp.rank
    random.seed(base)
    np.random.seed(base)
    torch.manual_seed(base)
    model_parallel_cuda_manual_seed(base)


def finish(runtime: Runtime) -> None:
    """Leave the job: free the parallel groups, and the default group if this run made it."""
    parallel_state.destroy_model_parallel()
    if runtime.owns_world:
        dist.destroy_process_group()


def leave_now(code: int) -> None:
    """End this process at once after an error: peers may never answer, so nothing is waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
