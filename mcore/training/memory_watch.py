"""Memory in the log: the predicted bytes of every rank at the start, the measured ones beside."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mcore.config.run import RunConfig
from mcore.device import how_peak_is_measured, peak_bytes
from mcore.distributed import DataParallelModule
from mcore.log import get_logger
from mcore.optimizer import MegatronOptimizer
from mcore.topology.collectives import all_gather_object
from mcore.training.held_memory import held_memory
from mcore.training.initialize import Runtime
from mcore.training.memory import RankMemory, predict_memory
from mcore.training.memory_table import MeasuredMemory, measured_table, memory_table

#: The second step of a run is the first in which everything that stays is there.
_MEASURED_STEP = 2

_NO_PREDICTION = "no prediction, since the model is not the GPT model of the options"


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
        self._before = peak_bytes(runtime.device)
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

    def after_step(
        self, chunks: Sequence[DataParallelModule], optimizer: MegatronOptimizer
    ) -> None:
        """Log what was measured, once.

        Args:
            chunks: this rank's part of the model.
            optimizer: updates it.

        Comm: host-side facts over the tensor- and pipeline-parallel ranks.
        """
        self._steps += 1
        if not self._config.logging.log_memory or self._steps != _MEASURED_STEP:
            return
        ctx, device = self._runtime.ctx, self._runtime.device
        held = held_memory(chunks, optimizer, device)
        own = MeasuredMemory(ctx.pp.rank, held, peak_bytes(device) - self._before)
        lines = measured_table(all_gather_object(own, ctx.mp), self._predicted)
        how = how_peak_is_measured(device)
        beside = "measured / predicted" if self._predicted else _NO_PREDICTION
        get_logger().info(
            "memory of a rank after %d steps, MiB, %s; the measured peak is the %s:",
            self._steps,
            beside,
            how,
        )
        for line in lines:
            get_logger().info("  %s", line)
