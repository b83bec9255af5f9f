"""Helpers for tests of mcore and of code built on it."""

from mcore.testing.distributed import (
    WorkerError,
    preload_in_workers,
    run_distributed,
    shutdown_workers,
)

__all__ = ["WorkerError", "preload_in_workers", "run_distributed", "shutdown_workers"]
