"""A data set that is measured whole, whatever the batch size."""

from __future__ import annotations

import numpy as np

from mcore.data.delegating_dataset import DelegatingDataset
from mcore.data.gpt_dataset import Sample, SampleDataset


class WholeDataset(DelegatingDataset):
    """A data set followed by samples without loss, up to a whole number of batches.

    Args:
        dataset: at least one sample.
        batch: samples of a global batch.
    """

    def __init__(self, dataset: SampleDataset, batch: int) -> None:
        self._dataset = dataset
        self._length = -(-len(dataset) // batch) * batch

    def __len__(self) -> int:
        """Samples, those without loss included."""
        return self._length

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`; IndexError when there is none."""
        sample = super().__getitem__(index)
        if index < len(self._dataset):
            return sample
        return {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])}

    def _locate(self, index: int) -> tuple[SampleDataset, int]:
        if index >= self._length:
            raise IndexError(index)
        return self._dataset, index if index < len(self._dataset) else 0
