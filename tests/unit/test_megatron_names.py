"""Programs as a user of Megatron-Core writes them, with only the imported package renamed."""

import functools
import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from mcore import num_microbatches_calculator, parallel_state, tensor_parallel
from mcore import parallel_state as mpu
from mcore.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from mcore.model_parallel_config import ModelParallelConfig
from mcore.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from mcore.models.gpt.gpt_model import GPTModel
from mcore.optimizer import OptimizerConfig, get_megatron_optimizer
from mcore.optimizer_param_scheduler import OptimizerParamScheduler
from mcore.pipeline_parallel.schedules import get_forward_backward_func
from mcore.tensor_parallel import mappings
from mcore.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mcore.tensor_parallel.data import broadcast_data
from mcore.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from mcore.tensor_parallel.random import (
    CudaRNGStatesTracker,
    checkpoint,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
)
from mcore.tensor_parallel.utils import (
    VocabUtility,
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks,
)
from mcore.testing import run_distributed
from mcore.topology.group import as_group
from mcore.topology.param_sharding import sharding_of
from mcore.transformer.transformer_config import TransformerConfig
from mcore.utils import divide, ensure_divisibility, init_method_normal, scaled_init_method_normal

pytestmark = pytest.mark.dist


# --- parallel_state


def _getters():
    assert parallel_state.is_unitialized()
    assert parallel_state.get_tensor_model_parallel_group(check_initialized=False) is None
    with pytest.raises(AssertionError):
        parallel_state.get_data_parallel_group()
    for sizes in ({"tensor_model_parallel_size": 8}, {"pipeline_model_parallel_size": 3}):
        with pytest.raises(RuntimeError):
            parallel_state.initialize_model_parallel(**sizes)
    with pytest.raises(RuntimeError):  # interleaving needs a pipeline
        parallel_state.initialize_model_parallel(virtual_pipeline_model_parallel_size=2)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        context_parallel_size=1,
        order="tp-cp-ep-dp-pp",
    )
    rank = dist.get_rank()
    assert mpu.model_parallel_is_initialized()
    assert mpu.is_initialized()
    groups = {
        "tensor": mpu.get_tensor_model_parallel_group(),
        "pipeline": mpu.get_pipeline_model_parallel_group(check_initialized=True),
        "data": mpu.get_data_parallel_group(),
        "data with context": mpu.get_data_parallel_group(with_context_parallel=True),
        "context": mpu.get_context_parallel_group(),
        "model": mpu.get_model_parallel_group(),
        "embedding": mpu.get_embedding_group(),
        "tensor and data": mpu.get_tensor_and_data_parallel_group(with_context_parallel=True),
        "tensor and context": mpu.get_tensor_and_context_parallel_group(),
    }
    ones = {name: torch.ones(1) for name in groups}
    for name, group in groups.items():
        assert dist.get_rank(group) >= 0
        dist.all_reduce(ones[name], group=group)
    assert {name: int(total) for name, total in ones.items()} == {
        "tensor": 2,
        "pipeline": 2,
        "data": 1,
        "data with context": 1,
        "context": 1,
        "model": 4,
        "embedding": 2,
        "tensor and data": 2,
        "tensor and context": 2,
    }
    assert mpu.get_tensor_model_parallel_world_size() == 2
    assert mpu.get_tensor_model_parallel_rank() == rank % 2
    assert mpu.get_tensor_model_parallel_src_rank() == rank // 2 * 2
    assert mpu.get_pipeline_model_parallel_world_size() == 2
    assert mpu.get_pipeline_model_parallel_rank() == rank // 2
    assert mpu.get_pipeline_model_parallel_first_rank() == rank % 2
    assert mpu.get_pipeline_model_parallel_last_rank() == 2 + rank % 2
    assert mpu.get_pipeline_model_parallel_next_rank() == (rank + 2) % 4
    assert mpu.get_pipeline_model_parallel_prev_rank() == (rank - 2) % 4
    assert mpu.get_virtual_pipeline_model_parallel_world_size() == 2
    for guess in (
        mpu.get_virtual_pipeline_model_parallel_rank,
        functools.partial(mpu.set_virtual_pipeline_model_parallel_rank, 0),
    ):
        with pytest.raises(NotImplementedError, match="vp_stage"):
            guess()
    assert mpu.get_data_parallel_world_size() == mpu.get_data_parallel_world_size(True) == 1
    assert mpu.get_data_parallel_rank() == mpu.get_data_parallel_rank(with_context_parallel=True)
    assert mpu.get_data_parallel_src_rank() == rank
    assert mpu.get_context_parallel_world_size() == 1
    assert mpu.get_context_parallel_rank() == 0
    assert mpu.get_context_parallel_global_ranks() == [rank]
    assert mpu.get_tensor_and_context_parallel_world_size() == 2
    assert mpu.get_tensor_and_context_parallel_rank() == rank % 2
    assert mpu.is_rank_in_embedding_group()
    assert mpu.is_rank_in_position_embedding_group() == (rank < 2)
    assert mpu.is_pipeline_first_stage(ignore_virtual=True) == (rank < 2)
    assert mpu.is_pipeline_last_stage(ignore_virtual=True) == (rank >= 2)
    first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=0)
    last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=1)
    assert (first, last) == (rank < 2, rank >= 2)
    assert not mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=0)
    mpu.destroy_model_parallel()
    assert not mpu.model_parallel_is_initialized()


def test_getters():
    run_distributed(_getters, 4)


def _two_orders():
    ranks = {}
    for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
        mpu.initialize_model_parallel(1, 2, order=order)
        ranks[order] = mpu.get_pipeline_model_parallel_rank()
        mpu.destroy_model_parallel()
    return list(ranks.values())


def test_both_of_megatrons_rank_orders():
    assert run_distributed(_two_orders, 4) == [[0, 0], [0, 1], [1, 0], [1, 1]]


# --- tensor_parallel.mappings


def _functions():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_model_parallel_group()
    rank = parallel_state.get_tensor_model_parallel_rank()

    class Context:
        pass

    Context.group = group
    Context.tensor_parallel_output_grad = True
    x = torch.arange(8.0).view(4, 2) + 10 * rank
    both = [torch.arange(8.0).view(4, 2) + 10 * r for r in range(2)]
    total = sum(both)

    backward = mappings._CopyToModelParallelRegion.backward
    assert torch.equal(mappings._CopyToModelParallelRegion.apply(x, group), x)
    assert torch.equal(backward(Context(), x)[0], total)
    assert torch.equal(mappings._ReduceFromModelParallelRegion.apply(x, group), total)
    assert torch.equal(mappings._ReduceFromModelParallelRegion.backward(Context(), x)[0], x)
    own = x.chunk(2, 1)[rank]
    assert torch.equal(mappings._ScatterToModelParallelRegion.apply(x, group), own)
    joined = torch.cat(both, 1)
    assert torch.equal(mappings._ScatterToModelParallelRegion.backward(Context(), x)[0], joined)
    assert torch.equal(mappings._GatherFromModelParallelRegion.apply(x, group), joined)
    assert torch.equal(mappings._GatherFromModelParallelRegion.backward(Context(), x)[0], own)

    rows = x.chunk(2, 0)[rank]
    stacked = torch.cat(both, 0)
    scatter = mappings._ScatterToSequenceParallelRegion
    assert torch.equal(scatter.apply(x, group), rows)
    assert torch.equal(scatter.backward(Context(), x)[0], stacked)
    gather = mappings._GatherFromSequenceParallelRegion
    assert torch.equal(gather.apply(x, group), stacked)
    assert torch.equal(gather.apply(x, group, False), stacked)
    assert torch.equal(gather.backward(Context(), x)[0], total.chunk(2, 0)[rank])
    reduce_scatter = mappings._ReduceScatterToSequenceParallelRegion
    assert torch.equal(reduce_scatter.apply(x, group), total.chunk(2, 0)[rank])
    assert torch.equal(reduce_scatter.backward(Context(), x)[0], stacked)

    for region in (
        tensor_parallel.copy_to_tensor_model_parallel_region,
        tensor_parallel.reduce_from_tensor_model_parallel_region,
        tensor_parallel.scatter_to_tensor_model_parallel_region,
        tensor_parallel.gather_from_tensor_model_parallel_region,
        tensor_parallel.scatter_to_sequence_parallel_region,
        tensor_parallel.gather_from_sequence_parallel_region,
        tensor_parallel.reduce_scatter_to_sequence_parallel_region,
    ):
        assert torch.equal(region(x), region(x, group=group))
    gathered = tensor_parallel.gather_from_sequence_parallel_region(
        rows, tensor_parallel_output_grad=False
    )
    assert gathered.shape == x.shape


def test_functions_and_regions():
    run_distributed(_functions, 2)


# --- tensor_parallel.layers


class _ParallelMLP(torch.nn.Module):
    """A feed-forward block as Megatron's users write it."""

    def __init__(self, config, tp_group=None):
        super().__init__()
        self.dense_h_to_4h = ColumnParallelLinear(
            8,
            32,
            config=config,
            init_method=init_method_normal(0.02),
            bias=True,
            gather_output=False,
            skip_bias_add=True,
            tp_group=tp_group,
        )
        self.dense_4h_to_h = RowParallelLinear(
            32,
            8,
            config=config,
            init_method=torch.nn.init.xavier_normal_,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=tp_group,
        )

    def forward(self, hidden_states):
        intermediate, bias = self.dense_h_to_4h(hidden_states)
        output, output_bias = self.dense_4h_to_h(F.gelu(intermediate + bias))
        assert output_bias is None
        return output


def _layers(sequence_parallel):
    parallel_state.initialize_model_parallel(2, 1)
    group = parallel_state.get_tensor_model_parallel_group()
    config = ModelParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.float32,
    )
    outputs = []
    for tp_group in (None, group):
        torch.manual_seed(3)
        mlp = _ParallelMLP(config, tp_group)
        assert mlp.dense_h_to_4h.output_size_per_partition == 16
        assert mlp.dense_4h_to_h.input_size_per_partition == 16
        weight = mlp.dense_h_to_4h.weight
        assert (weight.tensor_model_parallel, weight.partition_dim) == (True, 0)
        assert mlp.dense_4h_to_h.weight.partition_dim == 1
        assert weight.partition_stride == 1
        x = torch.randn(4, 2, 8)
        if sequence_parallel:
            x = tensor_parallel.scatter_to_sequence_parallel_region(x)
        outputs.append(mlp(x).detach())
    assert torch.equal(*outputs)
    embedding = VocabParallelEmbedding(16, 4, init_method=init_method_normal(0.02), config=config)
    assert (
        embedding.vocab_start_index,
        embedding.vocab_end_index,
    ) == VocabUtility.vocab_range_from_global_vocab_size(
        16, parallel_state.get_tensor_model_parallel_rank(), 2
    )
    assert embedding.num_embeddings_per_partition == 8
    if sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(outputs[0], False)
    return outputs[0]


def test_layers():
    whole = run_distributed(_layers, 2, False)
    parts = run_distributed(_layers, 2, True)
    for result in (*whole, *parts):
        torch.testing.assert_close(result, whole[0])


def _attributes():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = as_group(parallel_state.get_tensor_model_parallel_group())
    cut = torch.nn.Parameter(torch.zeros(3, 4))
    set_tensor_model_parallel_attributes(cut, is_parallel=True, dim=1, stride=2)
    copy = torch.nn.Parameter(torch.zeros(3, 4))
    copy_tensor_model_parallel_attributes(copy, cut)
    plain = torch.nn.Parameter(torch.zeros(3))
    set_defaults_if_not_set_tensor_model_parallel_attributes(plain)
    set_defaults_if_not_set_tensor_model_parallel_attributes(copy)
    # What the gradient norm and a checkpoint make of it.
    sharding = sharding_of(copy, group)
    places = [(piece.local_start, piece.global_start, piece.length) for piece in sharding.pieces]
    return (
        (copy.tensor_model_parallel, copy.partition_dim, copy.partition_stride),
        (plain.tensor_model_parallel, plain.partition_dim, plain.partition_stride),
        [param_is_not_tensor_parallel_duplicate(p) for p in (copy, plain)],
        (sharding.global_shape, sharding.tp_dim, places),
    )


def test_attributes_of_a_users_own_parameter():
    results = run_distributed(_attributes, 2)
    for rank, (copy, plain, counts, sharding) in enumerate(results):
        assert copy == (True, 1, 2)
        assert plain == (False, -1, 1)
        assert counts == [True, rank == 0]
        places = [(0, 2 * rank, 2), (2, 4 + 2 * rank, 2)]
        assert sharding == ((3, 8), 1, places)


# --- tensor_parallel.{cross_entropy,data,utils,random}


def _small_functions():
    parallel_state.initialize_model_parallel(4, 1)
    rank = parallel_state.get_tensor_model_parallel_rank()
    logits = torch.arange(8.0).repeat(16, 4)
    target = torch.arange(0, 32, 2)
    loss = vocab_parallel_cross_entropy(logits, target)
    whole = logits.repeat(1, 4)
    torch.testing.assert_close(loss, F.cross_entropy(whole, target, reduction="none"))

    data = {key: torch.full((2, 3), float(key)) for key in range(4)}
    received = broadcast_data([0, 1], data if rank == 0 else None, torch.float32)
    assert torch.equal(received[1], data[1])

    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(split_tensor_along_last_dim(x, 2)[1], x[:, 2:])
    chunk = split_tensor_into_1d_equal_chunks(x)
    assert torch.equal(chunk, x.flatten()[3 * rank : 3 * rank + 3])
    assert chunk.data_ptr() == x.flatten()[3 * rank :].data_ptr()
    assert torch.equal(split_tensor_into_1d_equal_chunks(x, new_buffer=True), chunk)
    assert torch.equal(gather_split_1d_tensor(chunk), x.flatten())
    assert VocabUtility.vocab_range_from_per_partition_vocab_size(400, rank, 4) == (
        rank * 400,
        (rank + 1) * 400,
    )


def test_small_functions():
    run_distributed(_small_functions, 4)


def _random_states():
    parallel_state.initialize_model_parallel(2)
    tracker = CudaRNGStatesTracker()
    tracker.set_states({"state1": 1234})
    assert tracker.get_states()["state1"] == 1234
    tracker.reset()
    assert tracker.get_states() == {}
    model_parallel_cuda_manual_seed(123)
    with get_cuda_rng_tracker().fork():
        cut = torch.rand(3)
    with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
        common = torch.rand(3)
    weight = torch.ones(3, requires_grad=True)
    y = checkpoint(lambda a, b: a * b, False, weight, torch.full((3,), 2.0))
    y.sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    return cut, common


def test_random_states():
    (cut0, common0), (cut1, common1) = run_distributed(_random_states, 2)
    assert torch.equal(common0, common1)
    assert not torch.equal(cut0, cut1)


def test_utilities():
    ensure_divisibility(8, 4)
    assert divide(8, 4) == 2
    with pytest.raises(AssertionError):
        divide(4, 5)
    torch.manual_seed(0)
    drawn = init_method_normal(0.02)(torch.empty(400, 400))
    assert drawn.std() == pytest.approx(0.02, rel=0.02)
    scaled = scaled_init_method_normal(0.02, 8)(torch.empty(400, 400))
    assert scaled.std() == pytest.approx(0.02 / 4, rel=0.02)


# --- microbatches and the learning rate


def test_microbatches():
    calculator = num_microbatches_calculator
    calculator.init_num_microbatches_calculator(
        rank=0,
        rampup_batch_size=[16, 8, 96],
        global_batch_size=32,
        micro_batch_size=4,
        data_parallel_size=2,
    )
    try:
        assert calculator.get_num_microbatches() == 2
        calculator.update_num_microbatches(48, consistency_check=False)
        assert calculator.get_num_microbatches() == 3
        assert calculator.get_current_global_batch_size() == 24
        with pytest.raises(AssertionError):
            calculator.init_num_microbatches_calculator(0, None, 32, 8, 2)
        calculator.reconfigure_num_microbatches_calculator(0, None, 32, 8, 2, False)
        assert calculator.get_num_microbatches() == 2
        assert calculator.get_micro_batch_size() == 8
        assert calculator.get_current_running_global_batch_size() == 32
    finally:
        calculator.destroy_num_microbatches_calculator()
    fixed = calculator.ConstantNumMicroBatchesCalculator(32, 8, 2, False, 0)
    assert fixed.get() == fixed.num_micro_batches == 2
    ramp = calculator.RampupBatchsizeNumMicroBatchesCalculator(32, 8, 2, False, 0, 16, 16, 48)
    assert (ramp.ramup_samples, ramp.get()) == (48, 1)


def test_scheduler():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=10,
        lr_decay_steps=110,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=110,
        wd_incr_style="constant",
    )
    group = optimizer.param_groups[0]
    rates = []
    for _ in range(12):
        rates.append(group["lr"])
        scheduler.step(increment=10)
    assert rates[:3] == pytest.approx([0.0, 1.0, 0.91])
    assert rates[11] == pytest.approx(0.1)
    assert group["weight_decay"] == 0.1
    assert scheduler.num_steps == 120
    assert scheduler.get_lr(group) == pytest.approx(0.1)
    assert scheduler.get_wd() == 0.1
    other = OptimizerParamScheduler(
        optimizer, 0.0, 1.0, 0.1, 10, 110, "linear", 0.1, 0.1, 110, "constant"
    )
    other.load_state_dict(scheduler.state_dict())
    assert other.num_steps == 120


# --- a training loop of the quick start


def _loss_func(loss_mask, output_tensor):
    losses = output_tensor.float()
    loss = torch.sum(losses.view(-1) * loss_mask.view(-1)) / loss_mask.sum()
    return loss, {"lm loss": loss.detach()}


def _forward_step(data_iterator, model):
    batch = next(data_iterator)
    output_tensor = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output_tensor, functools.partial(_loss_func, batch["loss_mask"])


def _batches(sequence_length, micro_batch_size):
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(100, (micro_batch_size, sequence_length), generator=generator)
        yield {
            "tokens": tokens,
            "labels": (tokens * 7 + 1) % 100,
            "loss_mask": torch.ones(micro_batch_size, sequence_length),
            "attention_mask": None,
            "position_ids": torch.arange(sequence_length).expand_as(tokens),
        }


def _quick_start(tp, pp):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(123)
    torch.manual_seed(123)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=100,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=False, overlap_grad_reduce=False)
    model = DistributedDataParallel(config=config, ddp_config=ddp_config, module=model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [model])
    forward_backward_func = get_forward_backward_func()
    batches = _batches(16, 4)
    history = []
    for _ in range(4):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses_reduced = forward_backward_func(
            forward_step_func=_forward_step,
            data_iterator=batches,
            model=model,
            num_microbatches=2,
            seq_length=16,
            micro_batch_size=4,
            decoder_seq_length=16,
            forward_only=False,
        )
        finalize_model_grads([model])
        optimizer.step()
        history.append([float(record["lm loss"]) for record in losses_reduced])
    return history


def test_quick_start_training_loop():
    alone = _quick_start(1, 1)
    assert sum(alone[-1]) < sum(alone[0])
    parallel_state.destroy_model_parallel()
    results = run_distributed(_quick_start, 4, 2, 2)
    for history in results[2:]:  # the last stage
        torch.testing.assert_close(torch.tensor(history), torch.tensor(alone), rtol=0, atol=2e-5)
    assert all(step == [] for history in results[:2] for step in history)


# --- what is not built is absent, not ignored


@pytest.mark.parametrize(
    ("function", "absent"),
    [
        (parallel_state.initialize_model_parallel, "expert_model_parallel_size"),
        (model_parallel_cuda_manual_seed, "te_rng_tracker"),
        (ColumnParallelLinear.__init__, "stride"),
        (ColumnParallelLinear.__init__, "is_expert"),
        (RowParallelLinear.__init__, "tp_comm_buffer_name"),
        (mappings.gather_from_sequence_parallel_region, "output_split_sizes"),
    ],
)
def test_arguments_that_are_not_built_are_absent(function, absent):
    parameters = inspect.signature(function).parameters
    assert absent not in parameters
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values())
