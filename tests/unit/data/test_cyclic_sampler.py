"""The cyclic sampler against Megatron's rule, written out as lists."""

import pytest
import torch

from mcore.data.cyclic_sampler import CyclicSampler
from mcore.errors import DataError


def megatron(total, micro, dp, rank, consumed, sharding):
    """The micro-batches of one rank from consumed samples to the end of that epoch."""
    step = micro * dp
    active = total - total % step
    epoch, used = divmod(consumed, active)
    generator = torch.Generator()
    generator.manual_seed(epoch)
    if sharding:
        bucket = total // step * micro
        order = torch.randperm(bucket, generator=generator).tolist()
        mine = [rank * bucket + x for x in order[used // dp :]]
    else:
        order = torch.randperm(total // micro * micro, generator=generator).tolist()
        mine = order[used:][rank::dp]
    batches = [mine[i : i + micro] for i in range(0, len(mine), micro)]
    return [batch for batch in batches if len(batch) == micro][: (active - used) // step]


@pytest.mark.parametrize("sharding", [True, False])
@pytest.mark.parametrize(("total", "micro", "dp"), [(37, 2, 3), (24, 1, 4), (9, 4, 2)])
def test_equals_megatron_from_any_point(total, micro, dp, sharding):
    step = micro * dp
    active = total - total % step
    for rank in range(dp):
        sampler = CyclicSampler(
            total_samples=total,
            micro_batch_size=micro,
            data_parallel_rank=rank,
            data_parallel_size=dp,
            data_sharding=sharding,
        )
        for consumed in (0, step, active - step, active, 3 * active + step):
            expected = megatron(total, micro, dp, rank, consumed, sharding)
            until = (consumed // active + 1) * active
            points = range(consumed, until, step)
            assert [sampler.microbatch(point) for point in points] == expected


def test_without_sharding_layouts_see_the_same_batches():
    def batch(micro, dp, consumed):
        samplers = [
            CyclicSampler(
                total_samples=48,
                micro_batch_size=micro,
                data_parallel_rank=rank,
                data_parallel_size=dp,
                data_sharding=False,
            )
            for rank in range(dp)
        ]
        points = range(consumed, consumed + 8, micro * dp)
        pairs = [
            pair
            for point in points
            for s in samplers
            for pair in zip(s.positions(point), s.microbatch(point), strict=True)
        ]
        return sorted(pairs)

    for consumed in (0, 8, 48, 96 + 16):
        assert batch(1, 1, consumed) == batch(2, 1, consumed) == batch(2, 2, consumed)
        assert batch(1, 4, consumed) == batch(1, 1, consumed)
        assert [place for place, _ in batch(1, 1, consumed)] == [*range(consumed, consumed + 8)]


def test_refusals():
    with pytest.raises(DataError, match="fewer than one micro-batch"):
        CyclicSampler(total_samples=3, micro_batch_size=2, data_parallel_size=2)
    with pytest.raises(DataError, match="no multiple of micro-batch size"):
        CyclicSampler(total_samples=12, micro_batch_size=4).microbatch(6)
