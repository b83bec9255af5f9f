"""Bytes that each rank will need, from the options alone: no process group, model or tensor.

Between steps a rank holds parameters, gradients, main parameters and moments (the table of
`docs/distributed_optimizer.md`). Inside a step there are also the activations of the microbatches
in flight, by the pipeline's own plan, and what exists for a moment only: gradients of activations,
a recomputed layer, the buffers of ZeRO-2, the gathered parameters of ZeRO-3, what the optimizer
widens. The peak is the largest sum over the step.

The figures are those of a GPT model of `pretrain_gpt.py`. Batches, masks, communication libraries
and the allocator's own losses are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore.config.run import RunConfig, resolve
from mcore.distributed.param_and_grad_buffer import aligned, plan_buffer
from mcore.pipeline_parallel.actions import Kind, Plan, split_backwards
from mcore.pipeline_parallel.pipeline import build_pipeline
from mcore.training.activation_memory import (
    block_activations,
    head_activations,
    layer_activations,
)
from mcore.training.parameter_count import (
    ParameterCount,
    count_parameters,
    parameter_sizes,
    vocabulary_rows,
)
from mcore.training.pipeline_plan import plan_pipeline, plan_split
from mcore.training.update_memory import update_workspace

#: Default of `--ddp-bucket-size` (see `DistributedDataParallel`).
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Predicted bytes of a pipeline rank; its tensor- and data-parallel ranks need the same.

    Attributes:
        pipeline_rank: which.
        num_parameters: of its part of the model, before they are dealt to data-parallel ranks.
        parameters: what the model computes with, between steps.
        gradients: accumulated gradients.
        main_parameters: fp32 copies that the optimizer updates.
        moments: the update rule's running tensors.
        in_host_memory: main parameters and moments that `--optimizer-cpu-offload` keeps off the
            device, and the place where their gradients arrive; not part of the others. Activations
            of `--cpu-offloading-num-layers` are in neither.
        activations: kept for backward, at the peak.
        workspace: everything else at the peak.
    """

    pipeline_rank: int
    num_parameters: int
    parameters: int
    gradients: int
    main_parameters: int
    moments: int
    in_host_memory: int
    activations: int
    workspace: int

    @property
    def between_steps(self) -> int:
        """What is held all the time."""
        return self.parameters + self.gradients + self.main_parameters + self.moments

    @property
    def peak(self) -> int:
        """The most that is held inside a step."""
        return self.between_steps + self.activations + self.workspace


def predict_memory(config: RunConfig, world_size: int) -> list[RankMemory]:
    """Bytes of each pipeline rank.

    Args:
        config: a checked configuration whose `tokenizer.vocab_size` is known.
        world_size: ranks of the job.

    Raises:
        ConfigError: the size of the vocabulary is not known.
        McoreError: a pipeline that cannot be planned.
    """
    plan = plan_pipeline(config)
    split = plan_split(config, plan)
    resolved = resolve(config, world_size)
    pp = config.model.pipeline_model_parallel_size
    plans = build_pipeline(plan.schedule, pp, resolved.num_microbatches).plans
    sharding = _Sharding.of(config, resolved.data_parallel_size, world_size)
    tokens = resolved.micro_batch_size * resolved.seq_length
    ranks = []
    for rank in range(pp):
        chunks = []
        for chunk in range(plan.placement.num_chunks):
            count = count_parameters(
                config,
                split[plan.placement.stage(rank, chunk)],
                pre_process=plan.placement.is_first_stage(rank, chunk),
                post_process=plan.placement.is_last_stage(rank, chunk),
            )
            chunks.append(_chunk(config, count, sharding, tokens, resolved.seq_length))
        ranks.append(_rank(config, rank, chunks, sharding, plans[rank]))
    return ranks


@dataclass(frozen=True, slots=True)
class _Sharding:
    """Who holds what: ZeRO stage, and the ranks that share."""

    stage: int
    ranks: int
    data_parallel_size: int
    pipeline_size: int
    keeps_gathered: bool

    @classmethod
    def of(cls, config: RunConfig, data_parallel_size: int, world_size: int) -> _Sharding:
        stage = config.ddp.sharding_stage if world_size > 1 else 0
        ranks = data_parallel_size // config.ddp.num_distributed_optimizer_instances
        pp = config.model.pipeline_model_parallel_size
        keeps = pp > 1 and not config.ddp.reshard_every_microbatch
        return cls(stage, ranks if stage else 1, data_parallel_size, pp, keeps)

    @property
    def accumulates_in_place(self) -> bool:
        """Whether matrix products add to the accumulated gradient themselves."""
        return self.stage < 2


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A model chunk: its parameters, and bytes of a microbatch.

    `moments` are (activations of this microbatch, what else there is) at the points of its backward
    where the sum may be largest. `gathered` is there all the time, `layers_gathered` in a forward.
    """

    count: ParameterCount
    activations: int
    moments: tuple[tuple[int, int], ...]
    gathered: int
    layers_gathered: int


def _chunk(
    config: RunConfig, count: ParameterCount, sharding: _Sharding, tokens: int, seq_length: int
) -> _Chunk:
    model = config.model
    size = model.params_dtype.itemsize
    layer = layer_activations(config, tokens, seq_length)
    kept, of_layers = block_activations(config, layer, count.layers)
    if count.embedding and model.hidden_dropout:
        kept += tokens * model.hidden_size
    always, layers_gathered = _gathered(config, count, sharding)
    sums = _microbatch_gradients(config, count, sharding)
    waiting = _waiting(config, count) if sharding.stage >= 2 else 0
    moments = [
        (held, beside + layers_gathered + sums.in_layers + waiting) for held, beside in of_layers
    ]
    # The embedding's gradient is made for the whole table; by then the layers' tensors are gone.
    moments.append((0, count.embedding * size + sums.at_embedding + waiting))
    moments.append((0, sums.at_end))
    activations = kept
    if count.final_norm:
        accumulates = config.model.gradient_accumulation_fusion and sharding.accumulates_in_place
        of_gradient = 4 if config.ddp.keeps_grads_wide else size
        head = head_activations(config, tokens, accumulates=accumulates, rounds=size < of_gradient)
        activations += head.kept
        moments.append((activations, head.gradients + layers_gathered))
    return _Chunk(count, activations, tuple(moments), always, layers_gathered)


def _waiting(config: RunConfig, count: ParameterCount) -> int:
    """Bytes of a tied matrix's gradient: autograd keeps it from output layer to embedding."""
    if config.gpt.untie_embeddings_and_output_weights or not (count.embedding and count.final_norm):
        return 0
    rows, size = vocabulary_rows(config), config.model.params_dtype.itemsize
    return rows * config.model.hidden_size * size


@dataclass(frozen=True, slots=True)
class _MicrobatchGradients:
    """Bytes of a microbatch's gradients on the way to their owners (ZeRO-2 and 3)."""

    in_layers: int = 0
    at_embedding: int = 0
    at_end: int = 0


def _microbatch_gradients(
    config: RunConfig, count: ParameterCount, sharding: _Sharding
) -> _MicrobatchGradients:
    size = config.model.params_dtype.itemsize
    reduced = 4 if config.ddp.keeps_grads_wide else size
    # Gloo has no reduce-scatter: all ranks' parts arrive, and are then summed.
    received = reduced + reduced // sharding.ranks if config.runtime.device == "cpu" else 0
    if sharding.stage == 2:
        return _of_buckets(config, count, _buckets(config, count, sharding), reduced, received)
    if sharding.stage == 3:
        layer = count.layer + count.layer_vectors
        # The layer before may still be on its way, in the wider type.
        before = reduced if reduced != size and count.layers > 1 else 0
        in_layers = layer * (size + before)
        at_end = count.embedding * (reduced + max(received, reduced // sharding.ranks))
        return _MicrobatchGradients(in_layers, count.embedding * reduced, at_end)
    return _MicrobatchGradients()


def _of_buckets(
    config: RunConfig, count: ParameterCount, buckets: list[int], reduced: int, received: int
) -> _MicrobatchGradients:
    """What fills, and what is being reduced; the last bucket is that of the embedding, if any.

    Args:
        config: the model.
        count: parameters of the chunk.
        buckets: their elements, in the order of their reductions.
        reduced: bytes of an element.
        received: bytes of an element beside it while it is reduced.
    """
    filling = [sum(buckets[max(0, i) : i + 2]) for i in range(-1, len(buckets) - 1)]
    if not config.ddp.overlap_grad_reduce:  # else one is being reduced while the next is filled
        filling = buckets
    of_layers = filling[:-1] if count.embedding and len(buckets) > 1 else filling
    in_layers = max(of_layers, default=0) * reduced
    last = filling[-1] if filling else 0
    waits = count.embedding * config.model.params_dtype.itemsize  # autograd lets go of it later
    at_end = last * reduced + (buckets[-1] * received if buckets else 0) + waits
    return _MicrobatchGradients(in_layers, last * reduced, at_end)


def _buckets(config: RunConfig, count: ParameterCount, sharding: _Sharding) -> list[int]:
    """Elements of ZeRO-2's buckets, in the order in which they are reduced."""
    sizes = parameter_sizes(config, count)[::-1]
    bucket = config.ddp.bucket_size or max(_BUCKET, _BUCKET_PER_RANK * sharding.data_parallel_size)
    if config.ddp.num_buckets is not None:
        bucket = -(-sum(map(aligned, sizes)) // config.ddp.num_buckets)
    alone = []
    if not config.gpt.untie_embeddings_and_output_weights and sharding.pipeline_size > 1:
        alone = [0] * bool(count.output) + [len(sizes) - 1] * bool(count.embedding)
    layout = plan_buffer(sizes, bucket, shards=sharding.ranks, alone=alone)
    return [end - start for start, end, _ in layout.buckets]


def _gathered(config: RunConfig, count: ParameterCount, sharding: _Sharding) -> tuple[int, int]:
    """Bytes of ZeRO-3's gathered parameters: all the time, and while the chunk computes."""
    if sharding.stage != 3:
        return 0, 0
    size = config.model.params_dtype.itemsize
    if sharding.keeps_gathered:
        return count.total * size, 0
    layer = count.layer + count.layer_vectors
    return (count.total - count.of_layers) * size, min(2, count.layers) * layer * size


def _rank(
    config: RunConfig, rank: int, chunks: Sequence[_Chunk], sharding: _Sharding, plan: Plan
) -> RankMemory:
    total = sum(chunk.count.total for chunk in chunks)
    matrices = sum(chunk.count.matrices for chunk in chunks)
    share = sharding.ranks
    size = config.model.params_dtype.itemsize
    main = max(size, 4)
    gradient = 4 if config.ddp.keeps_grads_wide else size
    moments = moment_bytes(config, total, matrices) // share
    updating = update_workspace(
        config, [chunk.count for chunk in chunks], ranks=sharding.ranks, stage=sharding.stage
    )
    activations, workspace = _peak(chunks, plan, updating)
    if sharding.stage == 3:
        held = {"parameters": main * total // share, "gradients": main * total // share}
        main_parameters = 0  # the shards are the main parameters
    else:
        of_gradients = share if sharding.stage == 2 else 1
        held = {"parameters": size * total, "gradients": gradient * total // of_gradients}
        main_parameters = main * total // share if main != size else 0
    in_host_memory = 0
    if config.optimizer.optimizer_cpu_offload and config.runtime.device != "cpu":
        part = config.optimizer.optimizer_offload_fraction
        # An fp32 parameter is its own main parameter, of which the host then has a copy.
        copies = arriving = main * total // share
        in_host_memory = int(part * (copies + arriving + moments))
        moments -= int(part * moments)
        main_parameters -= int(part * main_parameters)
    return RankMemory(
        pipeline_rank=rank,
        num_parameters=total,
        main_parameters=main_parameters,
        moments=moments,
        in_host_memory=in_host_memory,
        activations=activations,
        workspace=workspace,
        **held,
    )


def moment_bytes(config: RunConfig, total: int, matrices: int) -> int:
    """Bytes of the update rule's running tensors, before sharding.

    Args:
        config: which rule.
        total: parameters.
        matrices: those of them that lie in weight matrices of layers.
    """
    options = config.optimizer
    dtypes = (options.exp_avg_dtype, options.exp_avg_sq_dtype)
    adam = sum(2 if dtype == "bf16" else 4 for dtype in dtypes)
    if options.optimizer == "muon":
        return 8 * total - 4 * matrices
    return total * (adam if options.optimizer == "adam" else 4)


def _peak(chunks: Sequence[_Chunk], plan: Plan, updating: int) -> tuple[int, int]:
    """(activations, workspace) at the largest moment of the plan and the update after it.

    A microbatch's activations are held from its forward to its backward, or to its W.
    """
    split = split_backwards(plan)
    always = sum(chunk.gathered for chunk in chunks)
    held = 0
    best = (0, always)
    for action in plan:
        chunk = chunks[action.chunk]
        if action.kind is Kind.FORWARD:
            held += chunk.activations
            best = max(best, (held, always + chunk.layers_gathered), key=sum)
            continue
        if action.kind is Kind.BACKWARD:
            others = held - chunk.activations
            best = max([best, *((others + a, w + always) for a, w in chunk.moments)], key=sum)
        ends_here = (action.chunk, action.microbatch) not in split
        if ends_here or action.kind is Kind.WEIGHT:
            held -= chunk.activations
    return max(best, (0, updating), key=sum)
