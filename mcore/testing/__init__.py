"""Helpers for tests of mcore and of code built on it."""

from mcore.testing.answers import WorkerError
from mcore.testing.distributed import (
    preload_in_workers,
    run_distributed,
    serve_under_torchrun,
    shutdown_workers,
)

__all__ = [
    "WorkerError",
    "preload_in_workers",
    "run_distributed",
    "serve_under_torchrun",
    "shutdown_workers",
]
