"""One logger for the library: lines carry the rank, and rank filtering happens here."""

from __future__ import annotations

import logging
import sys

_LOGGER = logging.getLogger("mcore")
_ALIKE = "mcore_is_alike"


def get_logger() -> logging.Logger:
    """The library's logger; handlers are the application's business until `configure` is called."""
    return _LOGGER


def configure(rank: int, world_size: int, level: int = logging.INFO) -> None:
    """Write to stdout, warnings too: rank 0 from `level` up, other ranks from WARNING up."""
    _LOGGER.handlers.clear()
    handler = logging.StreamHandler(sys.stdout)
    prefix = "" if world_size == 1 else f"[rank {rank}] "
    handler.setFormatter(_PrefixFormatter(prefix, quiet_prefix=rank == 0))
    handler.addFilter(lambda record: rank == 0 or not getattr(record, _ALIKE, False))
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(level if rank == 0 else max(level, logging.WARNING))
    _LOGGER.propagate = False


class _PrefixFormatter(logging.Formatter):
    """Plain information lines from rank 0 stay bare, since other tools parse them."""

    def __init__(self, prefix: str, quiet_prefix: bool) -> None:
        super().__init__()
        self._prefix = prefix
        self._quiet = quiet_prefix

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            return f"{self._prefix}{record.levelname}: {text}"
        return text if self._quiet else self._prefix + text


def warn_alike(text: str, *args: object) -> None:
    """Warn of what every rank of the job finds alike: rank 0 alone says it."""
    _LOGGER.warning(text, *args, extra={_ALIKE: True})


def warn_ignored(option: str, reason: str) -> None:
    """Say that an option has no effect here, and why; nothing is ignored in silence."""
    warn_alike("%s has no effect: %s", option, reason)


def report_error(text: str) -> None:
    """Write an error that ends the process to stderr, whatever the logger is set to."""
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()
