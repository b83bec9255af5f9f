"""What is told beside the log line: phases, slow ranks, machines, memory, progress."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from mcore import device
from mcore.config.run import RunConfig
from mcore.log import get_logger
from mcore.topology.collectives import all_gather_object
from mcore.training.hardware import HardwareMeter, describe, find_nvml, process_memory
from mcore.training.initialize import Runtime
from mcore.training.scalars import tensorboard_directory
from mcore.training.setup import TrainState
from mcore.training.timers import RankTimes, Timers

_PROGRESS = "progress.txt"


class Reports:
    """Gathers from all ranks what one of them writes.

    Args:
        config: what is asked for.
        runtime: ranks and device.
        timers: phases that steps time, or None.

    Comm: gathers the hosts' names.
    """

    def __init__(self, config: RunConfig, runtime: Runtime, timers: Timers | None) -> None:
        self._options, self._save = config.logging, config.checkpoint.save
        self._runtime, self._timers = runtime, timers
        training = config.training
        is_packed = training.max_tokens_per_microbatch is not None  # samples of many lengths
        self._tokens_per_sample = None if is_packed else training.seq_length
        hosts = all_gather_object(socket.gethostname(), runtime.host)
        rank = runtime.host.rank
        self._host = hosts[rank]
        draws = tensorboard_directory(config) is not None or self._options.wandb_project is not None
        self._gathers_hardware = draws or self._options.log_hardware
        self._meter: HardwareMeter | None = None
        if self._gathers_hardware and hosts.index(self._host) == rank:
            has_gpu = runtime.device.type == "cuda"
            self._meter = HardwareMeter(nvml=find_nvml(is_expected=has_gpu))

    def interval(self, iteration: int, steps: int) -> dict[str, float]:
        """Write the reports of a log line. Collective.

        Args:
            iteration: finished iterations.
            steps: iterations since the last line.

        Returns:
            Curves to draw.

        Comm: one gather over all ranks' hosts for each report that is asked for.
        """
        options = self._options
        curves = self._times(steps)
        if self._gathers_hardware:
            curves |= self._hardware()
        if options.log_memory_to_tensorboard:
            curves |= self._memory()
        if options.log_memory_interval and iteration % options.log_memory_interval == 0:
            self._tell_memory()
        if options.log_world_size_to_tensorboard:
            curves["world-size"] = float(self._runtime.host.size)
        return curves

    def _times(self, steps: int) -> dict[str, float]:
        if self._timers is None or not self._timers.level:
            return {}
        times = RankTimes.gather(self._timers.take(), self._runtime.host)
        text = times.text(self._options.timing_log_option, steps)
        if text and self._options.timing_log_level:
            get_logger().info(text)
        if self._options.log_straggler:
            groups = self._runtime.ctx.layout.groups("tp")
            for line in times.stragglers(groups, steps):
                get_logger().info("straggler: %s", line)
        if not self._options.log_timers_to_tensorboard:
            return {}
        return {f"{name}-time": max(times.of(name).values()) / steps for name in times.names}

    def _hardware(self) -> dict[str, float]:
        own = None if self._meter is None else (self._host, self._meter.look())
        curves: dict[str, float] = {}
        for found in all_gather_object(own, self._runtime.host):
            if found is None:
                continue
            machine, values = found
            curves |= {f"hardware/{machine}/{name}": value for name, value in values.items()}
            if self._options.log_hardware:
                get_logger().info(describe(machine, values))
        return curves

    def _memory(self) -> dict[str, float]:
        where, host = self._runtime.device, process_memory()
        values = {
            "mem-reserved-bytes": device.reserved_bytes(where),
            "mem-max-allocated-bytes": device.allocated_bytes(where),
            "mem-host-bytes": host,
        }
        return {name: float(value) for name, value in values.items() if value is not None}

    def _tell_memory(self) -> None:
        for rank, values in enumerate(all_gather_object(self._memory(), self._runtime.host)):
            parts = [
                f"{name.removeprefix('mem-').removesuffix('-bytes')}: {value / 2**20:.1f}"
                for name, value in values.items()
            ]
            get_logger().info("memory of rank %d (MiB) | %s", rank, " | ".join(parts))

    def phases(self, seconds: Mapping[str, float]) -> None:
        """Write how long phases outside the steps took. Collective.

        Comm: one gather over all ranks' hosts.
        """
        text = RankTimes.gather(seconds, self._runtime.host).text(self._options.timing_log_option)
        if text:
            get_logger().info(text)

    def progress(self, what: str, state: TrainState, flops_per_sample: float) -> None:
        """Append a line to SAVE/progress.txt, on one rank.

        Args:
            what: has happened.
            state: where the run stands.
            flops_per_sample: floating-point operations of a sample of --seq-length tokens.
        """
        if not (self._options.log_progress and self._runtime.is_writer and self._save):
            return
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        samples = state.consumed_train_samples
        parts = [
            stamp,
            what,
            f"processes: {self._runtime.host.size}",
            f"iteration: {state.iteration}",
            f"samples: {samples}",
        ]
        if self._tokens_per_sample is not None:
            parts.append(f"tokens: {samples * self._tokens_per_sample}")
            computed = samples - state.passed_over_samples
            parts.append(f"floating-point operations: {computed * flops_per_sample:.6e}")
        line = "\t".join(parts) + "\n"
        with Path(self._save, _PROGRESS).open("a", encoding="utf-8") as file:
            file.write(line)
