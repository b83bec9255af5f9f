"""Lanes for `make test`, which runs two at a time (pytest-xdist).

A test on several ranks waits for messages a third of its time, a test on one leaves a core idle;
side by side they fill two cores. Trainings on ranks are one lane, since they share warm workers.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

RANKS = "tests/equivalence/"
LAST = "tests/equivalence/test_sharding.py"  # for the process that is through with its own first


class Lanes(LoadScopeScheduling):
    """Whole files, to whichever process is free; all trainings on ranks but the last to one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return RANKS if file.startswith(RANKS) and file != LAST else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes:
    return Lanes(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    if item.nodeid.startswith(LAST):
        return 2
    return 0 if item.nodeid.startswith(RANKS) else 1
