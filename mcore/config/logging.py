"""What is written down while training."""

from __future__ import annotations

from dataclasses import dataclass

from mcore.config.fields import flag
from mcore.errors import ConfigError


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
    metrics_jsonl: str | None = flag(
        None,
        metavar="FILE",
        help="One JSON object per iteration at full precision; a resumed run continues the file.",
    )

    def __post_init__(self) -> None:
        for name in ("log_interval", "tensorboard_log_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; use a whole number from 1 up")
