"""From a configuration to a process that knows its place: device, process groups, seeds, log."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from mcore import parallel_state
from mcore.config.run import RunConfig
from mcore.device import DeviceName, backend_name, pick_device
from mcore.errors import ConfigError
from mcore.log import configure, get_logger
from mcore.tensor_parallel.random import model_parallel_cuda_manual_seed
from mcore.topology.collectives import barrier
from mcore.topology.context import ParallelContext
from mcore.topology.group import Group
from mcore.training.pipeline_plan import PipelinePlan, plan_pipeline
from mcore.training.rendezvous import meet


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher (torchrun, or nobody) says about this process.

    Attributes:
        rank: number of this process in the job.
        world_size: processes in the job.
        local_rank: number of this process on its machine.
        by_torchrun: torchrun started this process, and ends the others when one fails.
    """

    rank: int
    world_size: int
    local_rank: int
    by_torchrun: bool = False


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where this process computes and with whom.

    Attributes:
        ctx: parallel groups.
        device: where its tensors live.
        owns_world: this run initialised torch.distributed and ends it.
        pipeline: schedule and stage placement.
        host: all ranks, for host-side facts: gloo, whatever the device communicates through.
    """

    ctx: ParallelContext
    device: torch.device
    owns_world: bool
    pipeline: PipelinePlan
    host: Group = field(default_factory=lambda: Group.single("host"))

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
    return Launch(
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        int(local),
        by_torchrun="TORCHELASTIC_RUN_ID" in os.environ,
    )


@dataclass(frozen=True, slots=True)
class World:
    """The job that this process has joined.

    Attributes:
        device: where its tensors live.
        backend: of the process groups.
        is_owned: this program initialised torch.distributed, and ends it.
    """

    device: torch.device
    backend: str
    is_owned: bool


def join_world(
    launch: Launch, device_name: DeviceName, backend: str | None = None, *, minutes: int = 10
) -> World:
    """Pick the device and create the default process group, where there are several processes.

    Args:
        launch: place of this process.
        device_name: `cpu`, `cuda`, or `auto` for CUDA where there is one.
        backend: `nccl` or `gloo`; None = the one of the device.
        minutes: after which a collective that does not finish fails.

    Comm: a rendezvous of all processes.

    Raises:
        ConfigError: a device or backend that is not there.
    """
    device = pick_device(device_name, launch.local_rank)
    backend = backend or backend_name(device)
    problem = backend_problem(backend, device)
    if problem is not None:
        raise ConfigError(problem)
    is_owned = launch.world_size > 1 and not dist.is_initialized()
    if is_owned:
        _create_default_group(backend, launch, timedelta(minutes=minutes))
    return World(device, backend, is_owned)


def backend_problem(backend: str | None, device: torch.device) -> str | None:
    """What stands against a backend on a device, in words."""
    if backend != "nccl" or device.type == "cuda":
        return None
    return "distributed_backend is nccl but the device is the CPU; use gloo"


def leave_world(is_owned: bool) -> None:
    """Free the parallel groups, and the default group if `join_world` made it."""
    parallel_state.destroy_model_parallel()
    if is_owned:
        dist.destroy_process_group()


def initialize(config: RunConfig, launch: Launch) -> Runtime:
    """Join the job.

    Comm: creates the default process group (only with several processes) and the parallel groups.

    Raises:
        ConfigError: a device or backend that is not there.
        TopologyError: sizes that do not fit the world.
    """
    configure(launch.rank, launch.world_size)
    minutes = config.runtime.distributed_timeout_minutes
    _choose_kernels(config.runtime.deterministic_mode)
    world = join_world(
        launch, config.runtime.device, config.runtime.distributed_backend, minutes=minutes
    )
    device, backend = world.device, world.backend
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
    return Runtime(ctx, device, world.is_owned, pipeline, host_group(minutes))


def host_group(minutes: int) -> Group:
    """All ranks over gloo, whatever the device communicates through. Collective."""
    if not dist.is_initialized():
        return Group.single("host")
    ranks = tuple(range(dist.get_world_size()))
    handle = dist.group.WORLD
    if str(dist.get_backend()) != "gloo":
        handle = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))
    return Group("host", ranks, dist.get_rank(), handle)


def _choose_kernels(deterministic: bool) -> None:
    if deterministic:  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def _create_default_group(backend: str, launch: Launch, timeout: timedelta) -> None:
    """Create the default group, under names of this start's own (see `meet`). Collective."""
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    if launch.by_torchrun:
        store = dist.PrefixStore(meet(store, rank, size, timeout), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


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
    """Leave the job: free the parallel groups, and the default group if this run made it.

    Comm: a barrier, since a rank that is gone counts as dead until all have come here.
    """
    barrier(runtime.host)
    if dist.is_initialized() and runtime.host.handle is not dist.group.WORLD:
        dist.destroy_process_group(runtime.host.handle)
    leave_world(runtime.owns_world)


def leave_now(code: int) -> None:
    """End this process at once after an error: peers may never answer, so nothing is waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
