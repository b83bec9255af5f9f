"""Garbage is collected when the options say so, and otherwise when Python does."""

import gc

import pytest

from mcore.config.training import RuntimeConfig
from mcore.errors import ConfigError
from mcore.training.garbage import collect_if_due, garbage_collection


def collections():
    return gc.get_stats()[2]["collections"]


def test_collections_happen_at_the_interval_alone():
    options = RuntimeConfig(manual_gc=True, manual_gc_interval=3)
    with garbage_collection(options):
        assert not gc.isenabled()
        before = collections()
        for iteration in range(1, 8):
            collect_if_due(options, iteration)
        assert collections() - before == 2
    assert gc.isenabled()


def test_without_the_flag_nothing_is_touched():
    gc.collect()  # so that none is due
    before = collections()
    with garbage_collection(RuntimeConfig()):
        assert gc.isenabled()
        collect_if_due(RuntimeConfig(), 1)
    assert collections() == before


def test_an_interval_needs_its_switch():
    with pytest.raises(ConfigError, match="manual-gc"):
        RuntimeConfig(manual_gc_interval=3)
