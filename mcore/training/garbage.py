"""When Python collects garbage: by itself, or at iterations that all ranks share (`--manual-gc`).

A collection stops a rank for some milliseconds, and through the collectives all the others.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from mcore.config.training import RuntimeConfig


@contextmanager
def garbage_collection(options: RuntimeConfig) -> Iterator[None]:
    """Leave collecting to `collect_if_due` inside the block, if the options say so."""
    if not options.manual_gc or not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_if_due(options: RuntimeConfig, iteration: int) -> None:
    """Collect where the iteration is a multiple of the interval; 0 = never."""
    interval = options.manual_gc_interval
    if options.manual_gc and interval and iteration % interval == 0:
        gc.collect()
