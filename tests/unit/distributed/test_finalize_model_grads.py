import pytest
import torch
from torch import nn

from mcore import parallel_state
from mcore.config.distributed import DistributedDataParallelConfig
from mcore.distributed import DistributedDataParallel, finalize_model_grads
from mcore.errors import TopologyError
from mcore.testing import run_distributed
from mcore.topology.context import ParallelContext
from mcore.topology.param_sharding import ParamSharding, Piece, replicated_sharding, set_sharding

pytestmark = pytest.mark.dist


def wrap(module, context=None):
    config = DistributedDataParallelConfig()
    ddp = DistributedDataParallel(None, config, module.double(), context=context)
    ddp.zero_grad_buffer()
    return ddp


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Stage(nn.Module):
    """Parameters by name, each used as loss += sum(weight * its factor)."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))

    def backward(self, **factors):
        sum((self.get_parameter(n) * f).sum() for n, f in factors.items()).backward()


def reduce_sequence_parallel():
    context = parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
    stage = Stage(declared=(3,), flagged=(2, 2), other=(5,))
    set_sharding(stage.declared, replicated_sharding((3,), context.tp, sequence_parallel=True))
    stage.flagged.sequence_parallel = True  # as a user of Megatron would
    ddp = wrap(stage)
    seed = context.tp.rank
    stage.backward(
        declared=random(3, seed=seed), flagged=random(2, 2, seed=seed), other=random(5, seed=9)
    )
    finalize_model_grads([ddp])
    return [p.main_grad.clone() for p in (stage.declared, stage.flagged, stage.other)]


def test_sequence_parallel_gradients_are_summed_over_tp():
    expected = [sum(random(*shape, seed=r) for r in range(4)) for shape in ((3,), (2, 2))]
    for grads in run_distributed(reduce_sequence_parallel, 4):
        torch.testing.assert_close(grads[:2], expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(grads[2], random(5, seed=9))


def qkv_pieces(rank):
    """4 query heads of 2 rows, 2 query groups, 4 ranks: by group [q, q, k, v], 8 rows each."""
    group = 8 * (rank // 2)
    owner = rank % 2 == 0
    return (
        Piece(0, group + 2 * (rank % 2), 2),
        Piece(2, group + 4, 2, is_owner=owner, is_shared=True),
        Piece(4, group + 6, 2, is_owner=owner, is_shared=True),
    )


def reduce_shared_rows():
    context = parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
    stage = Stage(weight=(6, 3), bias=(6,))
    set_sharding(stage.weight, ParamSharding((16, 3), 0, qkv_pieces(context.tp.rank)))
    set_sharding(stage.bias, ParamSharding((16,), 0, qkv_pieces(context.tp.rank)))
    ddp = wrap(stage)
    seed = context.tp.rank
    stage.backward(weight=random(6, 3, seed=seed), bias=random(6, seed=seed))
    finalize_model_grads([ddp])
    sums = [rows.total for rows in ddp.replicas.shared_rows]
    return stage.weight.main_grad.clone(), stage.bias.main_grad.clone(), sums


def test_gradients_of_replicated_key_and_value_rows_are_summed():
    whole = {"weight": torch.zeros(16, 3).double(), "bias": torch.zeros(16).double()}
    for rank in range(4):
        parts = {"weight": random(6, 3, seed=rank), "bias": random(6, seed=rank)}
        for piece in qkv_pieces(rank):
            for name, part in parts.items():
                rows = part[piece.local_start : piece.local_start + piece.length]
                whole[name][piece.global_start : piece.global_start + piece.length] += rows
    for rank, (weight, bias, sums) in enumerate(run_distributed(reduce_shared_rows, 4)):
        assert sums == [8, 8]  # only shared rows are communicated
        for piece in qkv_pieces(rank):
            local = slice(piece.local_start, piece.local_start + piece.length)
            total = slice(piece.global_start, piece.global_start + piece.length)
            torch.testing.assert_close(
                weight[local], whole["weight"][total], rtol=1e-14, atol=1e-14
            )
            torch.testing.assert_close(bias[local], whole["bias"][total], rtol=1e-14, atol=1e-14)


def reduce_tied(pp, chunks):
    """The embedding is on the first stage's first chunk, its copy on the last stage's last."""
    context = parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp)
    stages = [Stage(other=(2,)) for _ in range(chunks)]
    if context.pp.is_first:
        stages[0] = Stage(embedding=(4, 3))
    if context.pp.is_last:
        stages[-1] = Stage(head=(4, 3))
        sharding = ParamSharding((4, 3), 0, (Piece(0, 0, 4),), tied_key="embedding")
        set_sharding(stages[-1].head, sharding)
    model = [wrap(stage) for stage in stages]
    for stage in stages:
        for name, param in stage.named_parameters():
            stage.backward(**{name: random(*param.shape, seed=context.rank)})
    finalize_model_grads(model)
    return [p.main_grad.clone() for stage in stages for p in stage.parameters()]


@pytest.mark.parametrize(("pp", "chunks"), [(4, 1), (2, 2)])
def test_tied_embeddings_are_summed_over_first_and_last_stage(pp, chunks):
    ranks_per_stage = 4 // pp
    results = run_distributed(reduce_tied, 4, pp, chunks)
    # What data-parallel ranks of a stage sum up to, averaged.
    stages = [range(i * ranks_per_stage, (i + 1) * ranks_per_stage) for i in range(pp)]
    mean = [sum(random(4, 3, seed=r) for r in ranks) / ranks_per_stage for ranks in stages]
    for rank, grads in enumerate(results):
        stage = rank // ranks_per_stage
        if stage in (0, pp - 1):
            copy = grads[0] if stage == 0 else grads[-1]
            torch.testing.assert_close(copy, mean[0] + mean[-1], rtol=1e-14, atol=1e-14)
            assert torch.equal(copy, results[0][0])
        for grad in grads:
            if grad.shape == (2,):
                expected = sum(random(2, seed=r) for r in stages[stage]) / ranks_per_stage
                torch.testing.assert_close(grad, expected, rtol=1e-14, atol=1e-14)


def tie_to_nothing():
    context = parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    stage = Stage(weight=(2, 2))
    if context.pp.is_last:
        set_sharding(
            stage.weight, ParamSharding((2, 2), 0, (Piece(0, 0, 2),), tied_key="embedding")
        )
    ddp = wrap(stage)
    if context.pp.is_first:
        with pytest.raises(TopologyError, match="embedding is tied"):
            finalize_model_grads([ddp])


def test_a_copy_without_original_is_refused():
    run_distributed(tie_to_nothing, 2)


def normalise(order):
    context = parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, order=order)
    stage = Stage(weight=(3,))
    ddp = wrap(stage)
    stage.backward(weight=random(3, seed=context.dp.rank) / 8.0)
    tokens = 5 + 2 * context.dp.rank if context.pp.is_last else -1000
    finalize_model_grads([ddp], torch.tensor([tokens]), loss_denominator=8.0)
    return stage.weight.main_grad.clone()


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-pp-dp"])
def test_gradients_are_divided_by_the_global_number_of_tokens(order):
    expected = (random(3, seed=0) + random(3, seed=1)) / (5 + 7)
    for grad in run_distributed(normalise, 4, order):
        torch.testing.assert_close(grad, expected, rtol=1e-14, atol=1e-14)


def test_one_process_and_no_tokens():
    stage = Stage(weight=(3,))
    ddp = wrap(stage, ParallelContext.single())
    stage.backward(weight=torch.ones(3))
    finalize_model_grads([ddp])
    assert stage.weight.main_grad.tolist() == [1.0, 1.0, 1.0]
    ddp.zero_grad_buffer()
    finalize_model_grads([ddp], torch.tensor(0))
    assert stage.weight.main_grad.tolist() == [0.0, 0.0, 0.0]
