import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from mcore.data import GPTDataset, IndexedDataset, SampleOptions, SingleSampler
from mcore.data.batch_loader import BatchLoader
from mcore.errors import DataError
from tests.unit.data.corpora import counting_corpus


class Slow:
    """`length` samples of 4 tokens, read in an order that later samples may overtake."""

    def __init__(self, length, broken_at=None):
        self._length, self._broken_at = length, broken_at
        self.read = []

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        if index == self._broken_at:
            raise DataError(f"sample {index} is broken")
        time.sleep(0.002 * (index % 3))
        self.read.append(index)
        row = np.arange(4, dtype=np.int64) + 10 * index
        return {"tokens": row, "loss_mask": np.ones(4, np.float32)}


def sampler(length=1000, mbs=2, rank=0, size=1):
    return SingleSampler(
        total_samples=length,
        micro_batch_size=mbs,
        data_parallel_rank=rank,
        data_parallel_size=size,
    )


def data_threads():
    return [t for t in threading.enumerate() if t.name.startswith("mcore-data")]


@pytest.mark.parametrize("consumed", [0, 24, 40])
def test_a_global_batch_is_the_same_set_for_every_layout(consumed):
    for size in (1, 2, 4):
        for mbs in (1, 2):
            numbers = range(8 // (mbs * size))
            got = [
                index
                for rank in range(size)
                for number in numbers
                for index in sampler(mbs=mbs, rank=rank, size=size).microbatch(consumed, number)
            ]
            assert sorted(got) == list(range(consumed, consumed + 8))


def test_blocks_are_cut_in_rank_order():
    parts = [list(sampler(mbs=2, rank=rank, size=2).microbatch(8, 1)) for rank in range(2)]
    assert parts == [[12, 13], [14, 15]]


def test_impossible_layouts():
    for mbs, rank, size in ((0, 0, 1), (1, 2, 2), (1, -1, 2), (1, 0, 0)):
        with pytest.raises(DataError, match="no data-parallel layout"):
            sampler(mbs=mbs, rank=rank, size=size)


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_the_order_does_not_depend_on_workers(num_workers):
    with BatchLoader(
        Slow(1000), sampler(rank=1, size=2), consumed_samples=8, num_workers=num_workers
    ) as loader:
        for step in range(10):
            batch = next(loader)
            wanted = [8 + 4 * step + 2, 8 + 4 * step + 3]
            assert batch["sample_index"].tolist() == wanted
            assert batch["tokens"].dtype == torch.int64
            assert batch["tokens"].tolist() == [[10 * i + j for j in range(4)] for i in wanted]
            assert batch["loss_mask"].dtype == torch.float32
            assert batch["loss_mask"].shape == (2, 4)
            assert loader.consumed_samples == 8 + 4 * (step + 1)
    assert data_threads() == []


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("layouts", [((2, 1), (1, 4)), ((1, 4), (2, 2)), ((1, 2), (2, 1))])
def test_a_resume_at_another_layout_goes_on_where_the_run_stopped(num_workers, layouts):
    """Global batches of 8: three before the stop, three after it, each index exactly once."""
    consumed, seen = 0, []
    for mbs, size in layouts:
        loaders = [
            BatchLoader(
                Slow(48),
                sampler(48, mbs, rank, size),
                consumed_samples=consumed,
                num_workers=num_workers,
            )
            for rank in range(size)
        ]
        for _ in range(3):
            batches = [next(loader) for loader in loaders for _ in range(8 // (mbs * size))]
            batch = [index for one in batches for index in one["sample_index"].tolist()]
            read = [row for one in batches for row in one["tokens"].tolist()]
            assert read == [[10 * index + j for j in range(4)] for index in batch]
            assert sorted(batch) == list(range(consumed, consumed + 8))
            seen += batch
            consumed += 8
        assert {loader.consumed_samples for loader in loaders} == {consumed}
        for loader in loaders:
            loader.close()
    assert sorted(seen) == list(range(48))
    assert data_threads() == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_end_of_the_data_is_an_error_with_the_count(num_workers):
    with BatchLoader(Slow(9), sampler(9, mbs=2, size=2), num_workers=num_workers) as loader:
        assert [next(loader)["sample_index"].tolist() for _ in range(2)] == [[0, 1], [4, 5]]
        with pytest.raises(DataError, match="has 9 samples, and samples 8 to 11"):
            next(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_is_raised_where_its_batch_is_taken(num_workers):
    with BatchLoader(Slow(100, broken_at=5), sampler(100), num_workers=num_workers) as loader:
        assert next(loader)["sample_index"].tolist() == [0, 1]
        assert next(loader)["sample_index"].tolist() == [2, 3]
        for _ in range(2):  # the broken batch is never skipped
            with pytest.raises(DataError, match="sample 5 is broken"):
                next(loader)
        assert loader.consumed_samples == 4
    assert data_threads() == []


@pytest.mark.parametrize("mmap", [True, False])
def test_data_sets_can_be_read_in_a_forked_process(tmp_path, mmap):
    """Both ways of reading share no position in a file between parent and child."""
    indexed = IndexedDataset(counting_corpus(tmp_path / "c", [50] * 20), mmap=mmap)
    options = SampleOptions(seq_length=8, seed=1, eod_id=0)
    dataset = GPTDataset(indexed, np.arange(20), None, options)
    wanted = [dataset[index]["tokens"].tolist() for index in range(100)]

    def child():
        for _ in range(5):
            assert [dataset[index]["tokens"].tolist() for index in range(100)] == wanted

    ends = [forked(child) for _ in range(2)]
    for _ in range(5):
        assert [dataset[index]["tokens"].tolist() for index in range(100)] == wanted
    assert [end() for end in ends] == [0, 0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_belongs_to_the_process_that_made_it(num_workers):
    """A forked child has none of its threads; it is told so instead of waiting for ever."""
    with BatchLoader(Slow(100), sampler(100), num_workers=num_workers) as loader:
        next(loader)

        def child():
            with pytest.raises(DataError, match="another process"):
                next(loader)
            with BatchLoader(Slow(100), sampler(100), num_workers=num_workers) as own:
                assert next(own)["sample_index"].tolist() == [0, 1]

        assert forked(child)() == 0
        assert next(loader)["sample_index"].tolist() == [2, 3]


def forked(work):
    """Do some work in a child, which ends in any case; returns what waits for its exit status."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(240)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_reading_ahead_is_bounded():
    dataset = Slow(1000)
    with BatchLoader(dataset, sampler(mbs=1), num_workers=2) as loader:
        next(loader)
        end = time.monotonic() + 10
        while len(dataset.read) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        assert 1 < len(dataset.read) <= 5
    with pytest.raises(DataError, match="closed"):
        next(loader)
    loader.close()


def test_a_forgotten_loader_leaves_no_thread():
    loader = BatchLoader(Slow(1000), sampler(), num_workers=2)
    next(loader)
    assert data_threads()
    del loader
    gc.collect()
    deadline = time.monotonic() + 5
    while data_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert data_threads() == []


def test_index_only_batches_read_nothing():
    with BatchLoader(None, sampler(16, rank=1, size=2), consumed_samples=8) as loader:
        assert {key: row.tolist() for key, row in next(loader).items()} == {
            "sample_index": [10, 11]
        }
        next(loader)
        with pytest.raises(DataError, match="has 16 samples"):
            next(loader)
    unbounded = SingleSampler(total_samples=None, micro_batch_size=1)
    with BatchLoader(None, unbounded, consumed_samples=2**40) as loader:
        assert next(loader)["sample_index"].tolist() == [2**40]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_goes_on_wherever_it_is_told_to(num_workers):
    with BatchLoader(Slow(100), sampler(100), num_workers=num_workers) as loader:
        next(loader)
        loader.seek(40)  # ahead
        assert next(loader)["sample_index"].tolist() == [40, 41]
        loader.seek(2)  # back
        assert next(loader)["sample_index"].tolist() == [2, 3]
        assert next(loader)["tokens"][0, 0] == 40
        assert loader.consumed_samples == 6
