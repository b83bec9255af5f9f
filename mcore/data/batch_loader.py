"""Micro-batches of one rank, read ahead of the training step."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
import torch

from mcore.data.gpt_dataset import SampleDataset
from mcore.data.samplers import Sampler
from mcore.errors import DataError

Batch = dict[str, torch.Tensor]
"""The arrays of a `Sample`, [b, s] each, and `sample_index` int64 [b]."""

_AHEAD_PER_WORKER = 2


class BatchLoader:
    """An endless iterator over the micro-batches of one rank.

    The order depends on nothing but the sampler and `consumed_samples`: any number of workers gives
    the same batches. `sample_index` is the sample's place in the whole run (its consumed position),
    which is the same for every layout. An error while reading is raised where the batch is taken,
    and again by every later call: no batch is ever skipped. It belongs to the process that made it,
    for a forked one has none of its threads.

    Args:
        dataset: what is read; None = no tokens are read and batches hold `sample_index` alone (a
            pipeline stage that needs neither tokens nor labels).
        sampler: which samples this rank reads.
        consumed_samples: samples that all ranks consumed before; where a resumed run continues.
        num_workers: threads that read ahead; 0 = read when a batch is taken.
    """

    def __init__(
        self,
        dataset: SampleDataset | None,
        sampler: Sampler,
        *,
        consumed_samples: int = 0,
        num_workers: int = 2,
    ) -> None:
        self._dataset = dataset
        self._sampler = sampler
        self._consumed = consumed_samples
        self._closed = False
        self._process = os.getpid()
        self._ahead: deque[Future[Batch]] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._depth = _AHEAD_PER_WORKER * num_workers
        if num_workers > 0 and dataset is not None:
            self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="mcore-data")

    @property
    def consumed_samples(self) -> int:
        """Samples that all ranks have taken, those before the start included."""
        return self._consumed

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch of this rank.

        Raises:
            DataError: the data set is used up, a token is outside the vocabulary, or the loader is
                closed or of another process.
        """
        if self._closed:
            raise DataError("this batch loader is closed; make a new one from consumed_samples")
        if self._process != os.getpid():
            raise DataError("this batch loader was made in another process; make one in this one")
        step = self._sampler.samples_per_step
        if self._executor is None:
            batch = self._read(self._consumed)
        else:
            while len(self._ahead) <= self._depth:
                position = self._consumed + len(self._ahead) * step
                self._ahead.append(self._executor.submit(self._read, position))
            batch = self._ahead[0].result()
            self._ahead.popleft()
        self._consumed += step
        return batch

    def seek(self, consumed_samples: int) -> None:
        """Go on after so many samples of all ranks, ahead or back; what was read ahead is dropped.

        Args:
            consumed_samples: samples that all ranks have consumed, as at construction.
        """
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._consumed = consumed_samples

    def close(self) -> None:
        """Drop what was read ahead and end the threads; may be called twice."""
        self._closed = True
        self._ahead.clear()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, consumed_samples: int) -> Batch:
        chosen = self._sampler.microbatch(consumed_samples)
        places = self._sampler.positions(consumed_samples)
        sample_index = torch.tensor(places, dtype=torch.int64)
        if self._dataset is None:
            return {"sample_index": sample_index}
        samples = [self._dataset[index] for index in chosen]
        batch = {
            key: torch.from_numpy(np.stack([sample[key] for sample in samples]))
            for key in samples[0]
        }
        batch["sample_index"] = sample_index
        return batch
