"""Training data: indexed files, sample order, blends and samplers.

`BatchLoader` is imported from `mcore.data.batch_loader`: it alone needs torch, and the tools and
their worker processes start without it.
"""

from mcore.data.blended_dataset import BlendedDataset
from mcore.data.builder import build_train_valid_test_datasets
from mcore.data.gpt_dataset import (
    NO_PAD,
    GPTDataset,
    Sample,
    SampleDataset,
    SampleOptions,
    SamplePiece,
)
from mcore.data.indexed_builder import IndexedDatasetBuilder
from mcore.data.indexed_dataset import IndexedDataset
from mcore.data.indexed_format import DType, get_bin_path, get_idx_path
from mcore.data.samplers import SingleSampler

__all__ = [
    "NO_PAD",
    "BlendedDataset",
    "DType",
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "Sample",
    "SampleDataset",
    "SampleOptions",
    "SamplePiece",
    "SingleSampler",
    "build_train_valid_test_datasets",
    "get_bin_path",
    "get_idx_path",
]
