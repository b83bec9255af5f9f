import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from mcore.errors import LostPeerError
from mcore.training.rendezvous import meet


def start(store, order, size=4):
    """Ranks come one after the other; the names that they agree on."""
    with ThreadPoolExecutor(size) as pool:
        futures = {}
        for rank in order:
            futures[rank] = pool.submit(meet, store, rank, size, timedelta(seconds=20))
            time.sleep(0.02)
        return {futures[rank].result(timeout=20) for rank in order}


def test_every_start_has_a_name_of_its_own_whoever_comes_first():
    store = dist.HashStore()
    names = [start(store, order) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2])]
    assert [len(agreed) for agreed in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


def test_an_earlier_start_that_never_met_is_forgotten():
    """Rank 0 and 1 of the first start died before rank 2 and 3 came."""
    store = dist.HashStore()
    store.set("mcore/start", "dead")
    store.set("mcore/dead/1", "somebody")
    (name,) = start(store, [2, 3, 1, 0])
    assert name != "dead"


def test_one_rank_meets_itself():
    assert len(start(dist.HashStore(), [0], size=1)) == 1


def test_a_rank_whose_first_rank_never_comes_says_so():
    store = dist.HashStore()
    store.set("mcore/start", "dead")
    with pytest.raises(LostPeerError, match="rank 1 waited 0:00:00.200000 for rank 0"):
        meet(store, 1, 2, timedelta(seconds=0.2))
