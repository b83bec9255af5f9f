"""The accelerator behind one door: everything else in mcore is device-agnostic."""

from __future__ import annotations

import functools
import resource
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mcore.errors import ConfigError

DeviceName = Literal["auto", "cpu", "cuda"]


def pick_device(name: DeviceName, local_rank: int) -> torch.device:
    """Device of this process, made current.

    Args:
        name: `cpu`, `cuda`, or `auto` for CUDA where there is one.
        local_rank: number of this process on its machine, which picks the GPU.

    Raises:
        ConfigError: CUDA was asked for and is not there, or the machine has fewer GPUs than
            processes.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device is cuda but torch sees no GPU; use --device cpu or auto")
    if name == "cpu" or not available:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}; "
            "start at most one process per GPU"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def device_name(device: torch.device) -> str:
    """What a person calls it: the GPU's model, or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def backend_name(device: torch.device) -> str:
    """The torch.distributed backend for a device: nccl on CUDA, gloo on the CPU."""
    return "nccl" if device.type == "cuda" else "gloo"


def current_device() -> torch.device:
    """Device that random states live on: the current GPU if CUDA is in use, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def get_rng_state() -> Tensor:
    """State of the default generator of `current_device()`."""
    device = current_device()
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: Tensor) -> None:
    """Set the state of the default generator of `current_device()`."""
    device = current_device()
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def seed_rng(seed: int) -> None:
    """Seed the default generator of `current_device()`."""
    device = current_device()
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def allocated_bytes(device: torch.device) -> int | None:
    """Peak bytes that tensors took on a GPU; None on the CPU, where torch does not count them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def peak_bytes(device: torch.device) -> int:
    """The most bytes held so far: of tensors on a GPU, of the whole process on the CPU."""
    allocated = allocated_bytes(device)
    if allocated is not None:
        return allocated
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def how_peak_is_measured(device: torch.device) -> str:
    """What `peak_bytes` counts, in words."""
    return "allocated on the GPU" if device.type == "cuda" else "growth of the process"


def is_on_host(x: Tensor) -> bool:
    """Whether a tensor is in host memory."""
    return x.device.type == "cpu"


def host_copy(x: Tensor) -> Tensor:
    """A copy in host memory, pinned where there is a GPU: transfers need not be waited for."""
    pinned = torch.cuda.is_available()
    return torch.empty_like(x.detach(), device="cpu", pin_memory=pinned).copy_(x.detach())


def send(x: Tensor, device: torch.device) -> Tensor:
    """Start a copy to a device; the host waits for nothing, neither the copy nor what is before."""
    if device.type == "cuda" and is_on_host(x):
        x = x.pin_memory()  # of other memory the host would first wait for its turn
    return x.to(device, non_blocking=True)


class HostRead:
    """A few numbers on their way to the host.

    They come behind what the device has been given so far, and not behind what it is given until
    somebody waits for them.

    Args:
        numbers: tensors of one element each, on one device.
    """

    def __init__(self, *numbers: Tensor) -> None:
        self._numbers = torch.stack([number.detach().double().reshape(()) for number in numbers])
        self._event: torch.cuda.Event | None = None
        if self._numbers.device.type == "cuda":
            source = self._numbers
            self._numbers = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._numbers.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[float]:
        """The numbers, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return [float(number) for number in self._numbers.tolist()]


class SideStream:
    """A stream beside the one that the device computes on.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def work(self) -> AbstractContextManager[object]:
        """What is started within it begins after all that the device has been given so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Let the device wait for what was started here; the host does not wait."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Wait on the host."""
        self._stream.synchronize()


class HostTransfer:
    """Copies between a device and (pinned) host memory beside the device's own work.

    A tensor is converted on the device, before it leaves or after it has come: a host that converts
    would have to wait for the transfer first.

    Args:
        device: on the CPU copies are made at once.
        stream: what copies are made on; by default one of its own on a GPU.
    """

    def __init__(self, device: torch.device, stream: SideStream | None = None) -> None:
        is_cuda = device.type == "cuda"
        self._stream = SideStream(device) if stream is None and is_cuda else stream

    def start_to_host(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Start copies, after what the device has been given so far.

        Args:
            pairs: (on the device, on the host). They are taken one by one where they are copied, so
                that what is computed for one copy only is freed after it. All else must stay as it
                is until `wait_for_host`.
        """
        if self._stream is None:
            for source, target in pairs:
                target.copy_(source)
            return
        with self._stream.work():
            for source, target in pairs:
                target.copy_(source.to(target.dtype), non_blocking=True)

    def wait_for_host(self) -> None:
        """Wait on the host until the copies are there."""
        if self._stream is not None:
            self._stream.synchronize()

    def to_device(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy (host, device) pairs; the device waits for them, the host does not.

        The host may write to its tensors again after the next `wait_for_host`.
        """
        if self._stream is None:
            for source, target in pairs:
                target.copy_(source)
            return
        with self._stream.work():
            for source, target in pairs:
                target.copy_(source.to(target.device, non_blocking=True))
        self._stream.join()


@functools.cache
def _adds_wide_products(device: torch.device, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether a product of low-precision matrices can be added to a wider one in one GEMM.

    It is tried: versions of torch, GPUs and libraries differ in what they offer.
    """
    if device.type != "cuda":
        return False
    try:
        ones = torch.ones(16, 16, dtype=narrow, device=device)
        total = torch.ones(16, 16, dtype=wide, device=device)
        torch.addmm(total, ones.t(), ones, out_dtype=wide, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17.0).all())


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to a sum in place: [m, n] += [m, k] [k, n].

    One GEMM that adds in place where all have one dtype, and on GPUs that can also where `total` is
    wider. Elsewhere the product exists for a moment, rounded to its own dtype.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif _adds_wide_products(total.device, left.dtype, total.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left.mm(right))


def reserved_bytes(device: torch.device) -> int | None:
    """Bytes that torch's allocator holds of a GPU; None on the CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None


def name_of(device: torch.device) -> str:
    """What the maker calls the GPU, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def start_capture() -> AbstractContextManager[object]:
    """Begin the range that Nsight Systems captures, with a mark on every operation.

    Returns:
        What `stop_capture` ends.
    """
    torch.cuda.cudart().cudaProfilerStart()
    marks = torch.autograd.profiler.emit_nvtx(record_shapes=True)
    marks.__enter__()
    return marks


def stop_capture(marks: AbstractContextManager[object]) -> None:
    """End the range that `start_capture` began."""
    marks.__exit__(None, None, None)
    torch.cuda.cudart().cudaProfilerStop()


def record_memory_history() -> None:
    """From now on note every allocation of the GPU, with the Python stack that made it."""
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)


def dump_memory_history(path: Path) -> None:
    """Write what was noted, and stop noting."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def synchronize(device: torch.device) -> None:
    """Wait for the device; for timers at the log interval, never inside the step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Marks in the order in which the device does things, as seconds of the wall clock later.

    Args:
        device: on the CPU a mark is the time; on CUDA an event on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        synchronize(device)
        self._origin = time.time()
        self._zero = self.mark()

    def mark(self) -> Any:
        """A mark of now; the host waits for nothing."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another; on CUDA it waits for the later one."""
        if not self._is_cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end) / 1000.0)

    def seconds(self, mark: Any) -> float:
        """The wall-clock time of a mark; on CUDA it waits for the mark."""
        if not self._is_cuda:
            return float(self._origin + mark - self._zero)
        mark.synchronize()
        return float(self._origin + self._zero.elapsed_time(mark) / 1000.0)
