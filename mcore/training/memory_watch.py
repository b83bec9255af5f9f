"""Memory in the log: the predicted bytes of every rank at the start, the measured ones beside."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mcore import device
from mcore.config.run import RunConfig
from mcore.distributed import DataParallelModule
from mcore.log import get_logger
from mcore.topology.collectives import all_gather_object
from mcore.training.initialize import Runtime
from mcore.training.memory import RankMemory, memory_table, predict_memory

#: The second step of a run is the first in which everything that stays is there.
_MEASURED_STEP = 2


class MemoryWatch:
    """Tells what memory a run will need, and with `--log-memory` what it took.

    Made before the model is, so that on the CPU, where torch does not count, the growth of the
    process can be told from what it was before.

    Args:
        config: with the vocabulary's size.
        world_size: ranks of the job.
        runtime: groups and device.
    """

    def __init__(self, config: RunConfig, world_size: int, runtime: Runtime) -> None:
        self._config, self._world_size, self._runtime = config, world_size, runtime
        self._before = device.peak_bytes(runtime.device)
        self._predicted: Sequence[RankMemory] = ()
        self._steps = 0

    def tell_prediction(self, chunks: Sequence[DataParallelModule]) -> None:
        """Log the table, if the model has the parameters of the GPT model that it is about."""
        ranks = predict_memory(self._config, self._world_size)
        parts = [part for chunk in chunks for part in chunk.held_parts()]
        own = sum(math.prod(part.run.shape) for part in parts)
        if ranks[self._runtime.ctx.pp.rank].num_parameters != own:
            return
        self._predicted = ranks
        get_logger().info("predicted memory of a rank, MiB:")
        for line in memory_table(ranks):
            get_logger().info("  %s", line)

    def after_step(self) -> None:
        """Log what was measured, once.

        Comm: host-side facts over the tensor- and pipeline-parallel ranks.
        """
        self._steps += 1
        if not self._config.logging.log_memory or self._steps != _MEASURED_STEP:
            return
        ctx = self._runtime.ctx
        peak = device.peak_bytes(self._runtime.device) - self._before
        how = device.how_peak_is_measured(self._runtime.device)
        largest: dict[int, int] = {}
        for stage, found in all_gather_object((ctx.pp.rank, peak), ctx.mp):
            largest[stage] = max(largest.get(stage, 0), found)
        for stage, found in sorted(largest.items()):
            beside = "no prediction: the model is not the GPT model of the options"
            if self._predicted:
                beside = f"predicted {self._predicted[stage].peak / 2**20:.1f}"
            get_logger().info(
                "memory of pipeline rank %d after %d steps, MiB: %.1f (%s); %s",
                stage,
                self._steps,
                found / 2**20,
                how,
                beside,
            )
