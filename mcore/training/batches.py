"""The stream of micro batches that one model chunk reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mcore.data.batch_loader import BatchLoader
from mcore.data.gpt_dataset import SampleDataset
from mcore.data.samplers import Sampler
from mcore.device import send
from mcore.training.token_budget import TokenBudgetLoader
from mcore.transformer.documents import pack_documents
from mcore.transformer.dropout import DropoutState


@dataclass(slots=True)
class BatchStream:
    """Iterates over the micro batches of one chunk and says what dropout depends on.

    Every rank reads what its stage needs itself: reading a few kilobytes from a mapped file is
    cheaper than broadcasting them. A middle stage reads nothing, unless its attention depends on
    where documents start.

    Attributes:
        loader: reads the samples.
        seed: the run's seed.
        device: where batches go.
        iteration: the optimizer step under way, from 1; set by the loop.
        waited: seconds that micro batches kept the caller waiting since `take_wait`.
    """

    loader: BatchLoader | TokenBudgetLoader
    seed: int
    device: torch.device
    iteration: int = 0
    waited: float = 0.0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next micro batch: tensors [b, s] on the device, and `dropout_state`.

        Where attention keeps to documents, `attention_mask` is a `PackedDocuments`.
        """
        start = time.perf_counter()
        read = next(self.loader)
        self.waited += time.perf_counter() - start
        starts = read.pop("is_document_start", None)
        batch: dict[str, Any] = {name: send(x, self.device) for name, x in read.items()}
        if starts is not None:
            batch["attention_mask"] = pack_documents(starts).to(self.device)
        batch["dropout_state"] = DropoutState(self.seed, self.iteration, batch["sample_index"])
        return batch

    def take_wait(self) -> float:
        """Seconds spent waiting for samples since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited

    def seek(self, consumed_samples: int) -> None:
        """Go on after so many samples of all ranks, wherever the stream stands."""
        self.loader.seek(consumed_samples)

    def close(self) -> None:
        """End the reading threads."""
        self.loader.close()


def build_stream(
    dataset: SampleDataset,
    sampler: Sampler,
    *,
    consumed_samples: int,
    num_workers: int,
    seed: int,
    device: torch.device,
    reads_tokens: bool,
) -> BatchStream:
    """The stream of one chunk.

    Args:
        dataset: training, validation or test set.
        sampler: which of its samples this rank reads.
        consumed_samples: global samples consumed before this run.
        num_workers: reading threads.
        seed: the run's seed.
        device: where batches go.
        reads_tokens: the chunk needs something of the samples.
    """
    loader = BatchLoader(
        dataset if reads_tokens else None,
        sampler,
        consumed_samples=consumed_samples,
        num_workers=num_workers,
    )
    return BatchStream(loader, seed, device)
