"""A program that seeds each stage differently still trains one tied embedding."""

import pytest
import torch

from mcore import parallel_state
from mcore.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
)
from mcore.models.gpt import GPTModel
from mcore.optimizer import OptimizerConfig, get_megatron_optimizer
from mcore.testing import run_distributed
from mcore.transformer import TransformerConfig

pytestmark = pytest.mark.dist

STAGES = {"no_shard": 0, "optim": 0, "optim_grads_params": 3}


def copies_before_and_after(strategy, virtual, seeds):
    """The tied matrix of this rank as drawn, and once the optimizer is built."""
    context = parallel_state.initialize_model_parallel(1, 2, virtual)
    torch.manual_seed(seeds[context.pp.rank])
    config = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=2,
        params_dtype=torch.bfloat16 if strategy == "optim" else torch.float32,
    )
    wrapper = FullyShardedDataParallel if STAGES[strategy] == 3 else DistributedDataParallel
    chunks, drawn = [], None
    for chunk in range(virtual or 1):
        model = GPTModel(
            config,
            vocab_size=11,
            max_sequence_length=4,
            pre_process=context.pp.is_first and chunk == 0,
            post_process=context.pp.is_last and chunk == (virtual or 1) - 1,
            share_embeddings_and_output_weights=True,
            vp_stage=None if virtual is None else chunk,
        )
        weight = model.shared_embedding_or_output_weight()
        drawn = weight.detach().clone() if weight is not None else drawn
        options = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
        chunks.append(wrapper(config, options, model))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), chunks)
    (now,) = [
        part.data.view(drawn.shape).clone()
        for chunk in chunks
        for part in chunk.held_parts()
        if part.name == "embedding.word_embeddings.weight"
    ]
    (main,) = [p.main.view(drawn.shape) for p in optimizer.params if "word_embeddings" in p.name]
    return drawn, now, main.detach().clone()


@pytest.mark.parametrize(
    ("strategy", "virtual"),
    [("no_shard", None), ("no_shard", 2), ("optim", None), ("optim_grads_params", None)],
)
def test_the_first_stages_copy_is_everybodys(strategy, virtual):
    first, last = run_distributed(copies_before_and_after, 2, strategy, virtual, (5, 105))
    assert not torch.equal(first[0], last[0])
    for _, now, main in (first, last):
        assert torch.equal(now, first[0].to(now.dtype))
        assert torch.equal(main, first[0].float())


def test_equal_seeds_keep_their_numbers():
    for drawn, now, _ in run_distributed(copies_before_and_after, 2, "no_shard", None, (5, 5)):
        assert torch.equal(now, drawn)
