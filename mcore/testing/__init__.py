"""Helpers for tests of mcore and of code built on it."""

from mcore.testing.distributed import WorkerError, run_distributed, shutdown_workers

__all__ = ["WorkerError", "run_distributed", "shutdown_workers"]
