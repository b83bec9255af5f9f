"""How many microbatches make up a global batch, constant or growing at the start of training.

The classes are pure functions of the samples consumed; the module-level functions keep one of them
for code written against Megatron. mcore's own training loop holds a calculator itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mcore.errors import ConfigError, NotInitializedError
from mcore.log import get_logger


class NumMicroBatchesCalculator(ABC):
    """Batch size at a number of consumed samples, and the microbatches that it takes.

    Args:
        micro_batch_size: samples per microbatch and data-parallel rank.
        data_parallel_size: number of data-parallel ranks.
        decrease_batch_size_if_needed: where a batch size is no multiple of micro batch x
            data-parallel size, use the next lower one.
        rank: rank 0 logs.
    """

    def __init__(
        self,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
    ) -> None:
        _need_positive(micro_batch_size=micro_batch_size, data_parallel_size=data_parallel_size)
        self.micro_batch_size = micro_batch_size
        self.data_parallel_size = data_parallel_size
        self.decrease_batch_size_if_needed = decrease_batch_size_if_needed
        self.rank = rank
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.num_micro_batches = 0
        self.current_global_batch_size = 0
        self.current_running_global_batch_size = 0

    def get(self) -> int:
        """Number of microbatches per data-parallel rank."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """Global batch size that the options ask for at present, in samples."""
        return self.current_global_batch_size

    def get_micro_batch_size(self) -> int:
        """Samples per microbatch and data-parallel rank."""
        return self.micro_batch_size

    def get_current_running_global_batch_size(self) -> int:
        """Global batch size in use: lower where `decrease_batch_size_if_needed` had to act."""
        return self.current_running_global_batch_size

    def update(
        self, consumed_samples: int, consistency_check: bool = True, verbose: bool = False
    ) -> None:
        """Set the batch size for the iteration that starts after `consumed_samples`.

        Args:
            consumed_samples: samples trained on so far.
            consistency_check: refuse a batch size that is no whole number of microbatches.
            verbose: log a change.

        Raises:
            ConfigError: the batch size does not divide by micro batch x data-parallel size.
        """
        wanted = self.global_batch_size_at(consumed_samples)
        step = self.micro_batch_times_data_parallel_size
        if consistency_check and not self.decrease_batch_size_if_needed and wanted % step:
            raise ConfigError(
                f"global batch size ({wanted}) must be divisible by micro batch size "
                f"({self.micro_batch_size}) x data-parallel size ({self.data_parallel_size}); "
                "change one of them or use --decrease-batch-size-if-needed"
            )
        running = wanted - wanted % step if self.decrease_batch_size_if_needed else wanted
        changed = wanted != self.current_global_batch_size
        self.current_global_batch_size = wanted
        self.current_running_global_batch_size = running
        self.num_micro_batches = running // step
        if verbose and changed and self.rank == 0:
            asked = "" if running == wanted else f" (asked for: {wanted})"
            get_logger().info(
                "global batch size %d%s in %d microbatches", running, asked, self.num_micro_batches
            )

    @abstractmethod
    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Global batch size that the options ask for after `consumed_samples`."""

    @abstractmethod
    def global_batch_sizes(self) -> Sequence[int]:
        """Every global batch size that the options ask for at some time."""

    def last_change(self) -> int:
        """Consumed samples from which on the global batch size stays as it is."""
        return 0


class ConstantNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """The same global batch size throughout.

    Raises:
        ConfigError: it is no whole number of microbatches, or less than one.
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool = False,
        rank: int = 0,
    ) -> None:
        super().__init__(micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)
        _need_positive(global_batch_size=global_batch_size)
        self.global_batch_size = global_batch_size
        self.update(0, verbose=decrease_batch_size_if_needed)
        if self.num_micro_batches < 1:
            raise ConfigError(
                f"global batch size ({global_batch_size}) is less than micro batch size "
                f"({micro_batch_size}) x data-parallel size ({data_parallel_size}): no microbatch "
                "fits"
            )

    def global_batch_size_at(self, consumed_samples: int) -> int:  # noqa: ARG002  (constant)
        """The global batch size."""
        return self.global_batch_size

    def global_batch_sizes(self) -> Sequence[int]:
        """The one."""
        return (self.global_batch_size,)


class RampupBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """A global batch size that grows in equal steps, each lasting equally many samples.

    With n = (global - start) / increment steps the size after c samples is
    start + floor(c n / ramup_samples) increment, and the full size beyond `ramup_samples`.

    Args:
        global_batch_size: samples per iteration after the ramp.
        micro_batch_size: samples per microbatch and data-parallel rank.
        data_parallel_size: number of data-parallel ranks.
        decrease_batch_size_if_needed: see the base class.
        rank: rank 0 logs.
        start_global_batch_size: samples of the first iteration.
        batch_size_increment: what a step adds, in samples.
        ramup_samples: samples over which the size grows (Megatron's spelling).

    Raises:
        ConfigError: sizes that are not positive or do not form whole steps.
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
        start_global_batch_size: int,
        batch_size_increment: int,
        ramup_samples: int,
    ) -> None:
        super().__init__(micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)
        _need_positive(
            global_batch_size=global_batch_size,
            start_global_batch_size=start_global_batch_size,
            batch_size_increment=batch_size_increment,
        )
        growth = global_batch_size - start_global_batch_size
        if ramup_samples < 0 or growth < 0 or growth % batch_size_increment:
            raise ConfigError(
                f"a batch size ramp from {start_global_batch_size} to {global_batch_size} by "
                f"{batch_size_increment} over {ramup_samples} samples has no whole steps up; the "
                "difference must be a multiple of the increment"
            )
        self.global_batch_size = global_batch_size
        self.start_global_batch_size = start_global_batch_size
        self.batch_size_increment = batch_size_increment
        self.ramup_samples = ramup_samples
        self.num_increments = growth // batch_size_increment
        # The first sizes need not divide: only those that are trained with are checked.
        self.update(0, consistency_check=False, verbose=True)

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Size of the iteration that starts after `consumed_samples`."""
        if consumed_samples >= self.ramup_samples:
            return self.global_batch_size
        # In integers, so that a step falls on its sample exactly.
        steps = consumed_samples * self.num_increments // self.ramup_samples
        return self.start_global_batch_size + steps * self.batch_size_increment

    def global_batch_sizes(self) -> Sequence[int]:
        """Those of the ramp, and the full size."""
        if not self.ramup_samples:
            return (self.global_batch_size,)
        start, increment = self.start_global_batch_size, self.batch_size_increment
        return range(start, self.global_batch_size + 1, increment)

    def last_change(self) -> int:
        """The end of the ramp."""
        return self.ramup_samples


class StepBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """A global batch size by thresholds of consumed samples.

    Args:
        schedule: (first sample, global batch size) pairs, ascending from sample 0.
        micro_batch_size: samples per microbatch and data-parallel rank.
        data_parallel_size: number of data-parallel ranks.
        rank: rank 0 logs.
    """

    def __init__(
        self,
        schedule: Sequence[tuple[int, int]],
        micro_batch_size: int,
        data_parallel_size: int,
        rank: int = 0,
    ) -> None:
        super().__init__(micro_batch_size, data_parallel_size, False, rank)
        self.schedule = tuple(schedule)
        self.update(0, consistency_check=False)

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Size of the iteration that starts after `consumed_samples`."""
        return next(size for first, size in reversed(self.schedule) if consumed_samples >= first)

    def global_batch_sizes(self) -> Sequence[int]:
        """Those of the thresholds."""
        return tuple(size for _, size in self.schedule)

    def last_change(self) -> int:
        """The last threshold."""
        return self.schedule[-1][0]


_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_step_schedule(text: str, seq_length: int) -> list[tuple[int, int]]:
    """`TOKENS:SAMPLES` pairs as (first sample, global batch size), ascending from sample 0.

    Args:
        text: such as "0:16 1.5B:32"; K, M, B and T stand for powers of 1000.
        seq_length: tokens a sample.

    Raises:
        ConfigError: a pair that cannot be read, sizes below 1, or thresholds that do not ascend
            from 0.
    """
    schedule: list[tuple[int, int]] = []
    for pair in text.replace(",", " ").split():
        tokens, _, size = pair.partition(":")
        unit = _SUFFIXES.get(tokens[-1:].upper(), 1)
        try:
            first = float(tokens[:-1] if unit > 1 else tokens) * unit
            schedule.append((-(-int(first) // seq_length), int(size)))
        except ValueError as error:
            raise ConfigError(
                f"--step-batch-size-schedule: {pair!r} is not TOKENS:SAMPLES, such as 1B:32"
            ) from error
    firsts = [first for first, _ in schedule]
    if firsts[:1] != [0] or firsts != sorted(set(firsts)) or min(s for _, s in schedule) < 1:
        raise ConfigError(
            f"--step-batch-size-schedule {text!r}: the first pair must start at 0 tokens, the "
            "others later each, and sizes be 1 or more"
        )
    return schedule


_CALCULATOR: NumMicroBatchesCalculator | None = None


def build_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> NumMicroBatchesCalculator:
    """The calculator that the options ask for.

    Args:
        rank: rank 0 logs.
        rampup_batch_size: start size, increment and ramp-up samples, or None.
        global_batch_size: samples per iteration, after any ramp.
        micro_batch_size: samples per microbatch and data-parallel rank.
        data_parallel_size: number of data-parallel ranks.
        decrease_batch_size_if_needed: use a lower size where one does not divide.
    """
    sizes = (global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
    if rampup_batch_size is None:
        return ConstantNumMicroBatchesCalculator(*sizes, rank)
    if len(rampup_batch_size) != 3:
        raise ConfigError(
            "rampup_batch_size takes three numbers: start batch size, increment, ramp-up samples; "
            f"got {list(rampup_batch_size)}"
        )
    start, increment, samples = map(int, rampup_batch_size)
    return RampupBatchsizeNumMicroBatchesCalculator(*sizes, rank, start, increment, samples)


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Set up the calculator of this process; see `build_num_microbatches_calculator`.

    Raises:
        ConfigError: it is set up already.
    """
    if _CALCULATOR is not None:
        raise ConfigError(
            "the microbatch calculator is initialised already; call "
            "reconfigure_num_microbatches_calculator or destroy_num_microbatches_calculator"
        )
    reconfigure_num_microbatches_calculator(
        rank,
        rampup_batch_size,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
    )


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Replace the calculator of this process; see `build_num_microbatches_calculator`."""
    global _CALCULATOR  # the one calculator of Megatron's module interface
    _CALCULATOR = build_num_microbatches_calculator(
        rank,
        rampup_batch_size,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
    )


def destroy_num_microbatches_calculator() -> None:
    """Forget the calculator of this process."""
    global _CALCULATOR  # the one calculator of Megatron's module interface
    _CALCULATOR = None


unset_num_microbatches_calculator = destroy_num_microbatches_calculator


def _calculator() -> NumMicroBatchesCalculator:
    if _CALCULATOR is None:
        raise NotInitializedError(
            "the microbatch calculator is not initialised; call "
            "init_num_microbatches_calculator first"
        )
    return _CALCULATOR


def get_num_microbatches() -> int:
    """Number of microbatches per data-parallel rank."""
    return _calculator().get()


def get_current_global_batch_size() -> int:
    """Global batch size that the options ask for at present, in samples."""
    return _calculator().get_current_global_batch_size()


def get_micro_batch_size() -> int:
    """Samples per microbatch and data-parallel rank."""
    return _calculator().get_micro_batch_size()


def get_current_running_global_batch_size() -> int:
    """Global batch size in use, after any decrease."""
    return _calculator().get_current_running_global_batch_size()


def update_num_microbatches(
    consumed_samples: int, consistency_check: bool = True, verbose: bool = False
) -> None:
    """Set the batch size for the iteration that starts after `consumed_samples`."""
    _calculator().update(consumed_samples, consistency_check, verbose)


def _need_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
