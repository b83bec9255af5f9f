"""Which layers a stage holds.

A split is the number of layers of each global stage, in the order of the chain. Layers are dealt
out from that list by running sums, so that none can be dropped or doubled.
"""

from __future__ import annotations

from itertools import accumulate

from mcore.errors import ConfigError
from mcore.topology.placement import StagePlacement


def split_layers(
    num_layers: int,
    pp: int,
    num_chunks: int = 1,
    *,
    num_layers_in_first_pipeline_stage: int | None = None,
    num_layers_in_last_pipeline_stage: int | None = None,
    account_for_embedding_in_pipeline_split: bool = False,
    account_for_loss_in_pipeline_split: bool = False,
) -> tuple[int, ...]:
    """The number of layers of each global stage of the usual placement (stage = chunk * pp + rank).

    Args:
        num_layers: layers of the whole model.
        pp: pipeline size.
        num_chunks: chunks a rank (virtual pipeline size).
        num_layers_in_first_pipeline_stage: layers of rank 0 over all its chunks; None = as others.
        num_layers_in_last_pipeline_stage: the same of rank pp-1.
        account_for_embedding_in_pipeline_split: the embedding takes the place of one layer.
        account_for_loss_in_pipeline_split: the output layer takes the place of one layer.

    Returns:
        pp * num_chunks counts whose sum is num_layers.

    Raises:
        ConfigError: the layers cannot be split so; the message says which numbers would do.
    """
    for name, size in (("num_layers", num_layers), ("pp", pp), ("num_chunks", num_chunks)):
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}")
    first, last = num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage
    embedding, loss = account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split
    if first is None and last is None:
        counts = _even(num_layers, pp, num_chunks, embedding, loss)
    elif embedding or loss:
        raise ConfigError(
            "layers of the first or last pipeline stage (--decoder-first-pipeline-num-layers, "
            "--decoder-last-pipeline-num-layers) cannot be given together with "
            "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split: "
            "use one or the other"
        )
    else:
        counts = _uneven(num_layers, pp, num_chunks, first, last)
    assert sum(counts) == num_layers
    assert len(counts) == pp * num_chunks
    return counts


def balanced_split(
    num_layers: int, placement: StagePlacement, embedding_cost: float, loss_cost: float
) -> tuple[int, ...]:
    """The split whose most loaded rank, and then stage, has the least to do.

    Args:
        num_layers: layers of the whole model.
        placement: where the stages live.
        embedding_cost: cost of the embedding, in layers.
        loss_cost: cost of the output layer and loss, in layers.

    Returns:
        The number of layers of each global stage.

    Raises:
        ConfigError: fewer layers than stages between the first and the last.
    """
    stages = placement.num_stages
    load = [0.0] * stages
    load[0] += embedding_cost
    load[-1] += loss_cost
    counts = [0] * stages
    if num_layers < stages - 2:
        raise ConfigError(
            f"num_layers ({num_layers}) cannot be balanced over {stages} stages: use fewer stages"
        )
    for stage in range(1, stages - 1):  # a stage in the middle without a layer would be a waste
        counts[stage] += 1
        load[stage] += 1.0
    for _ in range(num_layers - sum(counts)):
        of_rank = [0.0] * placement.num_ranks
        for location, cost in zip(placement.locations, load, strict=True):
            of_rank[location.rank] += cost
        ranks = [location.rank for location in placement.locations]
        chosen = min(range(stages), key=lambda stage: (of_rank[ranks[stage]], load[stage], stage))
        counts[chosen] += 1
        load[chosen] += 1.0
    return tuple(counts)


def stage_layers(split: tuple[int, ...], stage: int) -> range:
    """The global layer numbers (from 0) that a global stage holds under a split."""
    ends = list(accumulate(split))
    return range(ends[stage] - split[stage], ends[stage])


def _even(
    num_layers: int, pp: int, num_chunks: int, embedding: bool, loss: bool
) -> tuple[int, ...]:
    stages = pp * num_chunks
    total = num_layers + embedding + loss
    if total % stages:
        counted = "".join(
            f" + 1 for the {what}" for what, on in (("embedding", embedding), ("loss", loss)) if on
        )
        low = total - total % stages - embedding - loss
        nearest = [n for n in (low, low + stages) if n > 0]
        raise ConfigError(
            f"num_layers ({num_layers}{counted}) must be divisible by the number of stages "
            f"({stages}: pipeline_model_parallel_size x virtual stages a rank): use "
            f"{' or '.join(map(str, nearest))} layers, or give the first or last stage its own "
            f"number (--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers)"
        )
    counts = [total // stages] * stages
    counts[0] -= embedding
    counts[-1] -= loss
    if min(counts) < 0:
        raise ConfigError(
            f"num_layers ({num_layers}) is too small to account for both embedding and loss in "
            f"one stage"
        )
    return tuple(counts)


def _uneven(
    num_layers: int, pp: int, num_chunks: int, first: int | None, last: int | None
) -> tuple[int, ...]:
    if pp == 1:
        raise ConfigError(
            f"--decoder-first-pipeline-num-layers ({first}) and --decoder-last-pipeline-num-layers "
            f"({last}) need pipeline_model_parallel_size > 1: with 1 the only stage holds all "
            f"{num_layers} layers"
        )
    for name, count in (("first", first), ("last", last)):
        if count is None:
            continue
        if count < 1:
            raise ConfigError(
                f"--decoder-{name}-pipeline-num-layers must be at least 1, got {count}"
            )
        if count % num_chunks:
            raise ConfigError(
                f"--decoder-{name}-pipeline-num-layers ({count}) must be divisible by the virtual "
                f"stages a rank ({num_chunks})"
            )
    ranks = [first, *[None] * (pp - 2), last]
    rest = num_layers - (first or 0) - (last or 0)
    middle = ranks.count(None)
    given = f"num_layers ({num_layers}) - first stage ({first or 0}) - last stage ({last or 0})"
    if middle == 0 and rest != 0:
        raise ConfigError(f"{given} = {rest} layers are left, and no stage is left to hold them")
    if middle and (rest <= 0 or rest % (middle * num_chunks)):
        raise ConfigError(
            f"{given} = {rest} must be a positive multiple of the other stages ({middle}) x "
            f"virtual stages a rank ({num_chunks}) = {middle * num_chunks}"
        )
    of_rank = [rest // middle if count is None else count for count in ranks]
    return tuple(count // num_chunks for count in of_rank) * num_chunks
