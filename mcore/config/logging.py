"""What is written down while training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mcore.config.fields import below, flag, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """Log line, TensorBoard, Weights & Biases and the full-precision record.

    Raises:
        ConfigError: an interval below 1, or options that need others.
    """

    log_interval: int = flag(100, help="Iterations between log lines.")
    log_throughput: bool = flag(
        False,
        help="TFLOP/s per GPU in the log line and TensorBoard; rates of the interval in the record "
        "of its last iteration (docs/throughput.md).",
    )
    log_progress: bool = flag(
        False,
        help="Append starts, saves and the end of the run to SAVE/progress.txt, with the samples, "
        "tokens and floating-point operations so far.",
    )
    timing_log_level: Literal[0, 1, 2] = flag(
        0,
        help="Phases that are timed: 0 set-up, saves and evaluations; 1 also parts of a step; 2 "
        "also every micro batch's.",
    )
    timing_log_option: Literal["max", "minmax", "all"] = flag(
        "minmax", help="Of all ranks' times: the longest, the shortest and longest, or each."
    )
    log_straggler: bool = flag(
        False,
        help="Say at each log line which rank, or which tensor-parallel ranks together, are the "
        "slowest in each phase that waits for no others.",
    )
    log_hardware: bool = flag(
        False,
        help="Say at each log line how busy each machine is: processors, memory, network, disks, "
        "and GPUs where nvidia-ml-py is installed. TensorBoard has it anyway.",
    )
    log_memory_interval: int | None = flag(
        None, help="Iterations between lines on each rank's memory; a multiple of --log-interval."
    )
    tensorboard_dir: str | None = flag(
        None, metavar="DIR", help="TensorBoard directory; SAVE/tensorboard when absent."
    )
    tensorboard_log_interval: int = flag(1, help="Iterations between TensorBoard points.")
    tensorboard_queue_size: int = flag(
        1000, help="Points that TensorBoard holds back before it writes; log lines write too."
    )
    log_timers_to_tensorboard: bool = flag(
        False, help="Write the longest time of each timed phase to TensorBoard."
    )
    log_memory_to_tensorboard: bool = flag(False, help="Write rank 0's memory to TensorBoard.")
    log_world_size_to_tensorboard: bool = flag(
        False, help="Write the number of processes to TensorBoard."
    )
    wandb_project: str | None = flag(
        None, help="Send all that TensorBoard gets to this Weights & Biases project; needs wandb."
    )
    wandb_exp_name: str | None = flag(None, help="Name of the run at Weights & Biases.")
    wandb_entity: str | None = flag(None, help="User or team at Weights & Biases.")
    wandb_save_dir: str | None = flag(
        None, metavar="DIR", help="Where wandb keeps its files; SAVE/wandb when absent."
    )
    log_memory: bool = flag(
        False, help="Log the memory that was measured in a run's second step beside the predicted."
    )
    metrics_jsonl: str | None = flag(
        None,
        metavar="FILE",
        help="One JSON object per iteration at full precision; a resumed run continues the file.",
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from below(
            self, 1, "log_interval", "tensorboard_log_interval", "tensorboard_queue_size"
        )
        memory = self.log_memory_interval
        if memory is not None and (memory < 1 or memory % self.log_interval):
            yield (
                f"`log_memory_interval` ({memory}) must be a multiple of `log_interval` "
                f"({self.log_interval})"
            )
        for name in ("wandb_exp_name", "wandb_entity", "wandb_save_dir"):
            if getattr(self, name) is not None and self.wandb_project is None:
                yield f"`{name}` needs `wandb_project`: give --wandb-project NAME"
