"""Pure helpers."""

import pytest
import torch

from mcore.errors import ShapeError
from mcore.tensor_parallel.utils import VocabUtility, divide, split_tensor_along_last_dim


def test_divide_is_exact():
    assert divide(12, 4) == 3
    with pytest.raises(ShapeError, match="12 is not divisible by 5"):
        divide(12, 5)


def test_split_gives_views_or_copies():
    x = torch.arange(24.0).view(2, 12)
    views = split_tensor_along_last_dim(x, 3)
    assert torch.equal(torch.cat(views, -1), x)
    assert views[1].data_ptr() == x[:, 4:].data_ptr()
    assert all(p.is_contiguous() for p in split_tensor_along_last_dim(x, 3, True))


def test_vocabulary_ranges():
    ranges = [VocabUtility.vocab_range_from_global_vocab_size(12, rank, 3) for rank in range(3)]
    assert [tuple(r) for r in ranges] == [(0, 4), (4, 8), (8, 12)]
    assert tuple(VocabUtility.vocab_range_from_per_partition_vocab_size(5, 2, 3)) == (10, 15)
    with pytest.raises(ShapeError, match="rank 3"):
        VocabUtility.vocab_range_from_per_partition_vocab_size(5, 3, 3)
