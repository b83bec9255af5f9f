"""What is written down while training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mcore.config.fields import below, flag, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """Log line, TensorBoard and the full-precision record.

    Raises:
        ConfigError: an interval below 1.
    """

    log_interval: int = flag(100, help="Iterations between log lines.")
    tensorboard_dir: str | None = flag(
        None, metavar="DIR", help="TensorBoard directory; SAVE/tensorboard when absent."
    )
    tensorboard_log_interval: int = flag(1, help="Iterations between TensorBoard points.")
    tensorboard_queue_size: int = flag(
        1000, help="TensorBoard points that may wait in memory before they are written."
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
