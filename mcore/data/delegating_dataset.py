"""A data set whose samples come from other data sets."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from mcore.data.gpt_dataset import Sample, SampleDataset, SamplePiece


class DelegatingDataset(ABC):
    """Answers for a sample by asking the data set that it comes from."""

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`; IndexError when there is none."""
        dataset, sample = self._locate(index)
        return dataset[sample]

    def provenance(self, index: int) -> tuple[SamplePiece, ...]:
        """Where the tokens of a sample come from, in order."""
        dataset, sample = self._locate(index)
        return dataset.provenance(sample)

    def attention_mask(self, index: int) -> np.ndarray:
        """What attention must not see, bool [1, s, s], True = hidden."""
        dataset, sample = self._locate(index)
        return dataset.attention_mask(sample)

    def document_starts(self, index: int) -> np.ndarray:
        """Positions of a sample where a document begins, int64 [documents]."""
        dataset, sample = self._locate(index)
        return dataset.document_starts(sample)

    @abstractmethod
    def _locate(self, index: int) -> tuple[SampleDataset, int]:
        """The data set that a sample comes from, and its number there."""
