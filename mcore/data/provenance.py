"""Which samples and documents a global batch consists of."""

from __future__ import annotations

from collections.abc import Sequence

from mcore.config.data import DataConfig
from mcore.data.cyclic_sampler import CyclicSampler
from mcore.data.gpt_dataset import SampleDataset
from mcore.data.samplers import Sampler, SingleSampler
from mcore.data.token_budget import BudgetedConversations


def build_sampler(
    options: DataConfig, total_samples: int, micro_batch_size: int, rank: int, size: int
) -> Sampler:
    """The sampler that `--dataloader-type` asks for.

    Args:
        options: which one.
        total_samples: of the data set.
        micro_batch_size: samples of one micro-batch of one rank.
        rank: place in the data-parallel group.
        size: ranks of the group.
    """
    if options.dataloader_type == "cyclic":
        return CyclicSampler(
            total_samples=total_samples,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=rank,
            data_parallel_size=size,
            data_sharding=options.data_sharding,
        )
    return SingleSampler(
        total_samples=total_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=rank,
        data_parallel_size=size,
    )


def samples_between(samplers: Sequence[Sampler], positions: range) -> list[tuple[int, int]]:
    """(place in the run, number in the data set) of the samples at some places, by place.

    Args:
        samplers: of every data-parallel rank.
        positions: places in the run; whole micro-batches of all ranks.
    """
    pairs: list[tuple[int, int]] = []
    for sampler in samplers:
        for consumed in range(positions.start, positions.stop, sampler.samples_per_step):
            pairs += zip(sampler.positions(consumed), sampler.microbatch(consumed), strict=True)
    return sorted(pairs)


def placed_samples(
    dataset: SampleDataset,
    options: DataConfig,
    positions: range,
    micro_batch_size: int,
    data_parallel_size: int,
) -> list[tuple[int, int]]:
    """(place in the run, number in the data set) of the samples of a layout, by place.

    Args:
        dataset: the training data.
        options: how it is sampled.
        positions: places in the run; whole global batches.
        micro_batch_size: samples of one micro-batch of one rank.
        data_parallel_size: number of data-parallel ranks.
    """
    if isinstance(dataset, BudgetedConversations):
        return [(position, position) for position in positions]
    samplers = [
        build_sampler(options, len(dataset), micro_batch_size, rank, data_parallel_size)
        for rank in range(data_parallel_size)
    ]
    return samples_between(samplers, positions)


def documents_between(
    dataset: SampleDataset,
    options: DataConfig,
    positions: range,
    micro_batch_size: int,
    data_parallel_size: int,
) -> dict[str, list[int]]:
    """Documents behind the samples at some places of a run: by corpus, ascending.

    The arguments are those of `placed_samples`.
    """
    placed = placed_samples(dataset, options, positions, micro_batch_size, data_parallel_size)
    found: dict[str, set[int]] = {}
    for _, number in placed:
        for piece in dataset.provenance(number):
            found.setdefault(piece.prefix, set()).add(piece.document)
    return {prefix: sorted(documents) for prefix, documents in sorted(found.items())}
