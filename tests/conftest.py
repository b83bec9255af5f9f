"""Lanes for `make test`, which runs two at a time (pytest-xdist).

A test on several ranks waits for messages a third of its time, a test on one leaves a core idle;
side by side they fill two cores. Trainings on ranks are one lane, since they share warm workers.
"""

from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

RANKS = Path(__file__).parent / "equivalence"


class Lanes(LoadScopeScheduling):
    """Whole files, to whichever process is free; all trainings on ranks to one."""

    def _split_scope(self, nodeid: str) -> str:
        return "ranks" if nodeid.startswith("tests/equivalence/") else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes:
    return Lanes(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: RANKS not in item.path.parents)  # the longest lane starts first
