"""A blend of data sets: sample k comes from the one that lags its share most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcore.data.blend import blend_order, normalise
from mcore.data.delegating_dataset import DelegatingDataset
from mcore.data.gpt_dataset import SampleDataset
from mcore.errors import DataError


class BlendedDataset(DelegatingDataset):
    """Draws from several data sets, each in its own order.

    Args:
        datasets: what is blended, each with at least one sample.
        weights: shares of the samples, any scale; None = in proportion to the lengths, and no
            sample twice.
        size: number of samples; None = every sample of every data set once (weights must be None).
        names: what messages call the data sets; None = by their numbers.
        needed: where the data sets cannot fill `size`, so many samples do; None = all of `size`.

    Raises:
        DataError: weights that are not above 0, or a size that the data sets cannot fill.
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        weights: Sequence[float] | None,
        size: int | None,
        names: Sequence[str] | None = None,
        needed: int | None = None,
    ) -> None:
        self.datasets = tuple(datasets)
        lengths = [len(dataset) for dataset in datasets]
        if weights is not None and size is None:
            raise DataError("a weighted blend needs a number of samples; give one, or no weights")
        if weights is not None and len(weights) != len(lengths):
            raise DataError(f"{len(weights)} weights for a blend of {len(lengths)} data sets")
        self.dataset_index, self.dataset_sample_index = blend_order(
            normalise(lengths if weights is None else weights),
            sum(lengths) if size is None else size,
            lengths if weights is None else None,
        )
        drawn = np.bincount(self.dataset_index, minlength=len(lengths))
        if needed is not None and (drawn > lengths).any():
            # Shares rounded up for each data set make a blend longer than what is asked for.
            self.dataset_index = self.dataset_index[:needed]
            self.dataset_sample_index = self.dataset_sample_index[:needed]
            drawn = np.bincount(self.dataset_index, minlength=len(lengths))
        for number, (count, length) in enumerate(zip(drawn.tolist(), lengths, strict=True)):
            if count > length:
                name = f"data set {number}" if names is None else names[number]
                raise DataError(
                    f"a blend of {size} samples draws {count} from {name}, which holds {length}; "
                    f"build it with more samples or give it a smaller weight"
                )

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.dataset_index)

    def _locate(self, index: int) -> tuple[SampleDataset, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend, which has {len(self)}")
        dataset = self.datasets[int(self.dataset_index[index])]
        return dataset, int(self.dataset_sample_index[index])
