"""Lanes for `make test`, which runs two at a time (pytest-xdist).

A test on several ranks waits for messages a third of its time, a test on one leaves a core idle;
side by side they fill two cores. Trainings on ranks stay one lane, since they share warm workers.
"""

from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "equivalence"


def pytest_itemcollected(item: pytest.Item) -> None:
    is_ranks = RANKS in item.path.parents
    item.add_marker(pytest.mark.xdist_group("ranks" if is_ranks else str(item.path)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: RANKS not in item.path.parents)  # the longest lane starts first
