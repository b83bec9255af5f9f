"""Lanes for `make test`, which runs two at a time (pytest-xdist).

A test on several ranks waits for messages a third of its time, a test on one leaves a core idle;
side by side they fill two cores. Trainings on ranks are one lane, since they share warm workers.

Under torchrun rank 0 runs the tests, and the other ranks do what its tests ask for.
"""

import os

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("mcore", deadline=None, derandomize=True)  # no clock, no chance
settings.load_profile("mcore")

RANKS = "tests/equivalence/"
LAST = "tests/equivalence/test_sharding.py"  # for the process that is through with its own first


class Lanes(LoadScopeScheduling):
    """Whole files, to whichever process is free; all trainings on ranks but the last to one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return RANKS if file.startswith(RANKS) and file != LAST else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes:
    return Lanes(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    for item in items:
        if item.nodeid.startswith(RANKS):
            item.add_marker(pytest.mark.dist)


def _place(item: pytest.Item) -> int:
    if item.nodeid.startswith(LAST):
        return 2
    return 0 if item.nodeid.startswith(RANKS) else 1


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ranks that no later test of this lane needs make room for those of the other."""
    goes_on = nextitem is not None and nextitem.nodeid.startswith(RANKS)
    if item.nodeid.startswith(RANKS) and not goes_on and "RANK" not in os.environ:
        from mcore.testing import shutdown_workers

        shutdown_workers()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> bool | None:
    if "RANK" not in os.environ:
        return None
    from mcore.testing import serve_under_torchrun  # loads torch, which many tests do without

    return serve_under_torchrun() or None
