"""How busy the machines are: processors, memory, network and disks from /proc, GPUs from NVML."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore.log import get_logger

_GIB = 2.0**30
_SECTOR_BYTES = 512  # /proc/diskstats counts in these, whatever the disk
#: A kernel, or what stands for one in a container, may lack a file or write it otherwise.
_UNREADABLE = (OSError, LookupError, ValueError)
_NO_DISKS = ("loop", "ram", "zram", "dm-", "md")


@dataclass(frozen=True, slots=True)
class Counters:
    """What only ever grows since the machine started.

    Attributes:
        seconds: of a clock.
        busy, total: processor time in ticks.
        received, sent: bytes over the network, the loopback left out.
        read, written: bytes of disks.
    """

    seconds: float
    busy: float
    total: float
    received: float
    sent: float
    read: float
    written: float


class HardwareMeter:
    """Use of one machine since the last look.

    Args:
        proc: where the kernel tells; another folder in tests.
        nvml: NVIDIA's library, as `find_nvml` returns it.
    """

    def __init__(self, proc: str = "/proc", nvml: ModuleType | Any | None = None) -> None:
        self._proc = Path(proc)
        self._nvml = nvml
        self._last = self._count()

    def look(self) -> dict[str, float]:
        """Name -> value: percent, GiB and MB/s; what the machine does not tell is left out."""
        values: dict[str, float] = {}
        now, last = self._count(), self._last
        if now is not None and last is not None:
            values.update(rates(last, now))
        self._last = now
        values.update(self._memory())
        values.update(gpu_use(self._nvml))
        return values

    def _count(self) -> Counters | None:
        try:
            ticks = _numbers((self._proc / "stat").read_text().splitlines()[0].split()[1:9])
            received, sent = self._network()
            read, written = self._disks()
            idle = ticks[3] + ticks[4]
        except _UNREADABLE:
            return None
        return Counters(
            time.monotonic(), sum(ticks) - idle, sum(ticks), received, sent, read, written
        )

    def _network(self) -> tuple[float, float]:
        received = sent = 0.0
        for line in (self._proc / "net" / "dev").read_text().splitlines()[2:]:
            name, _, rest = line.partition(":")
            if name.strip() != "lo":
                numbers = _numbers(rest.split())
                received, sent = received + numbers[0], sent + numbers[8]
        return received, sent

    def _disks(self) -> tuple[float, float]:
        """Whole disks; a partition's name begins with that of its disk."""
        read = written = 0.0
        disk = "?"
        for line in (self._proc / "diskstats").read_text().splitlines():
            words = line.split()
            name = words[2]
            is_partition = name.startswith(disk) and name[len(disk) :].lstrip("p").isdigit()
            if is_partition or name.startswith(_NO_DISKS):
                continue
            disk = name
            read += float(words[5]) * _SECTOR_BYTES
            written += float(words[9]) * _SECTOR_BYTES
        return read, written

    def _memory(self) -> dict[str, float]:
        try:
            lines = (self._proc / "meminfo").read_text().splitlines()
            kib = {line.split(":")[0]: float(line.split()[1]) for line in lines if ":" in line}
            total = kib["MemTotal"] * 1024
            used = total - kib["MemAvailable"] * 1024
        except _UNREADABLE:
            return {}
        return {"memory-used-gib": used / _GIB, "memory-total-gib": total / _GIB}


def rates(last: Counters, now: Counters) -> dict[str, float]:
    """Use between two looks: processors in percent, traffic in MB/s."""
    seconds = max(now.seconds - last.seconds, 1e-9)
    ticks = now.total - last.total
    per_second = {
        "network-in": now.received - last.received,
        "network-out": now.sent - last.sent,
        "disk-read": now.read - last.read,
        "disk-write": now.written - last.written,
    }
    values = {f"{name}-mb-per-second": n / seconds / 1e6 for name, n in per_second.items()}
    if ticks > 0:
        values["cpu-percent"] = 100.0 * (now.busy - last.busy) / ticks
    return values


def find_nvml(*, is_expected: bool = False) -> ModuleType | None:
    """NVIDIA's management library (`nvidia-ml-py`), ready for use; None where there is none.

    Args:
        is_expected: there are GPUs: say why there is none.
    """
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        reason = "nvidia-ml-py is not installed (pip install 'mcore[gpu]')"
    except Exception as error:  # noqa: BLE001  (the library's errors have no common base but this)
        reason = f"NVML does not start: {error}"
    else:
        return nvml
    if is_expected:
        get_logger().info("the use of GPUs is not told: %s", reason)
    return None


def gpu_use(nvml: ModuleType | Any | None) -> dict[str, float]:
    """Utilisation in percent and memory in GiB of every GPU of the machine.

    What the driver does not tell is left out: the utilisation of a GPU that is cut into instances,
    a GPU that this user may not ask, one that fell off the bus. It never raises: other ranks wait.
    """
    values: dict[str, float] = {}
    if nvml is None:
        return values
    for index in range(_asked(nvml, nvml.nvmlDeviceGetCount) or 0):
        handle = _asked(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            continue
        rates = _asked(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        if rates is not None:
            values[f"gpu-{index}-percent"] = float(rates.gpu)
        if memory is not None:
            values[f"gpu-{index}-memory-used-gib"] = memory.used / _GIB
            values[f"gpu-{index}-memory-total-gib"] = memory.total / _GIB
    return values


def _asked(nvml: ModuleType | Any, question: Callable[..., Any], *details: Any) -> Any:
    """An answer of the driver, or None where it has none."""
    try:
        return question(*details)
    except nvml.NVMLError:
        return None


def describe(machine: str, values: Mapping[str, float]) -> str:
    """One line about a machine."""
    words = []
    if "cpu-percent" in values:
        words.append(f"cpu {values['cpu-percent']:.0f} %")
    if "memory-used-gib" in values:
        words.append(
            f"memory {values['memory-used-gib']:.1f} of {values['memory-total-gib']:.1f} GiB"
        )
    if "network-in-mb-per-second" in values:
        words.append(
            f"network in {values['network-in-mb-per-second']:.1f}, out "
            f"{values['network-out-mb-per-second']:.1f} MB/s"
        )
        words.append(
            f"disk read {values['disk-read-mb-per-second']:.1f}, write "
            f"{values['disk-write-mb-per-second']:.1f} MB/s"
        )
    gpus = {int(name.split("-")[1]) for name in values if name.startswith("gpu-")}
    words += [f"gpu {index} {_describe_gpu(values, index)}" for index in sorted(gpus)]
    return f"use of {machine}: {'; '.join(words)}"


def _describe_gpu(values: Mapping[str, float], index: int) -> str:
    percent = values.get(f"gpu-{index}-percent")
    used, total = (values.get(f"gpu-{index}-memory-{what}-gib") for what in ("used", "total"))
    parts = [] if percent is None else [f"{percent:.0f} %"]
    if used is not None and total is not None:
        parts.append(f"{used:.1f} of {total:.1f} GiB")
    return ", ".join(parts)


def process_memory() -> int | None:
    """Bytes of host memory that this process holds; None where the kernel does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _numbers(words: list[str]) -> list[float]:
    return [float(word) for word in words]
