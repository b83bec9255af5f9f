"""pretrain_gpt.py in which one rank meets a misfortune in the middle of a step.

    failing_program.py WHAT RANK COUNT MARKER SECONDS [flags of pretrain_gpt.py]

WHAT is `kill` (SIGKILL), `stop` (SIGSTOP) or `raise` (an exception), at the start of this rank's
COUNTth forward step; `kill-beside`: it is killed while the other ranks compute their next one,
which they never end; or `data`: its COUNTth sample cannot be read. It happens once: not where the
file MARKER exists, which it makes. Where timeouts are given in minutes, a minute has SECONDS.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pretrain_gpt
from mcore import parallel_state
from mcore.errors import DataError
from mcore.training import initialize, pretrain
from mcore.training.gpt import datasets_provider, model_provider


class Misfortune:
    """Knows when it is time."""

    def __init__(self, rank, count, marker, awaited=None):
        self._left = int(count) if os.environ.get("RANK", "0") == rank else 0
        self._marker, self._awaited = Path(marker), awaited

    def is_due(self):
        self._left -= 1
        if self._left != 0 or self._marker.exists():
            return False
        while self._awaited is not None and not self._awaited.exists():
            time.sleep(0.01)
        self._marker.write_text(str(os.getpid()))
        return True


def beside(marker):
    """What says that the rank is busy that outlives another."""
    return marker.with_name("beside")


def outlive(marker):
    """Be busy when it happens, which awaits that, and from then on."""
    beside(marker).touch()
    while not marker.exists():
        time.sleep(0.01)
    time.sleep(120)


class Corrupt:
    """A data set with a sample that cannot be read."""

    def __init__(self, samples, misfortune):
        self._samples, self._misfortune = samples, misfortune

    def __len__(self):
        return len(self._samples)

    def __getattr__(self, name):
        return getattr(self._samples, name)

    def __getitem__(self, index):
        if self._misfortune.is_due():
            raise DataError(f"sample {index} is corrupt")
        return self._samples[index]


def main():
    what, rank, count, marker, seconds, *flags = sys.argv[1:]
    awaited = beside(Path(marker)) if what == "kill-beside" else None
    misfortune = Misfortune(rank, count, marker, awaited)

    def of_short_minutes(minutes):
        return timedelta(seconds=minutes * float(seconds))

    initialize.timedelta = parallel_state.timedelta = of_short_minutes

    forwards = itertools.count()

    def forward_step(data_iterator, model):
        is_other = os.environ.get("RANK", "0") != rank
        if what == "kill-beside" and is_other and next(forwards) == int(count):
            outlive(Path(marker))
        if what != "data" and misfortune.is_due():
            if what == "raise":
                raise ValueError("a misfortune")
            os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)
        return pretrain_gpt.forward_step(data_iterator, model)

    def datasets(config, sizes):
        train, *others = datasets_provider(config, sizes)
        return (Corrupt(train, misfortune) if what == "data" else train, *others)

    pretrain(datasets, model_provider, forward_step, argv=flags)


if __name__ == "__main__":
    main()
