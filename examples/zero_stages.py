"""Lab A: one model at ZeRO stages 0, 1, 2 and 3, memory and speed side by side.

    torchrun --nproc-per-node 2 examples/zero_stages.py

Runs on CPUs or GPUs. Each stage trains the same model on the same numbers; the losses agree.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from mcore import parallel_state
from mcore.config.distributed import STRATEGIES
from mcore.device import backend_name, pick_device, synchronize
from mcore.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
    finalize_model_grads,
)
from mcore.models.gpt import GPTModel
from mcore.optimizer import OptimizerConfig, get_megatron_optimizer
from mcore.training.held_memory import held_memory
from mcore.training.initialize import read_launch
from mcore.transformer import TransformerConfig

STEPS, VOCABULARY, LENGTH = 5, 2000, 128


def train(stage: int, device: torch.device) -> tuple[float, float, int]:
    """Loss of the last step, seconds a step (but for the first), bytes kept between steps."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(
        config, vocab_size=VOCABULARY, max_sequence_length=LENGTH, seed=1234,
        share_embeddings_and_output_weights=True,
    ).to(device)  # fmt: skip
    options = DistributedDataParallelConfig(data_parallel_sharding_strategy=STRATEGIES[stage])
    wrap = FullyShardedDataParallel if stage == 3 else DistributedDataParallel
    chunk = wrap(config, options, model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), [chunk])
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator).to(device)
    started = 0.0
    for step in range(1 + STEPS):
        if step == 1:  # the first one also warms up
            synchronize(device)
            started = time.perf_counter()
        chunk.zero_grad_buffer()
        loss = chunk(tokens[:, :-1], labels=tokens[:, 1:]).mean()
        loss.backward()
        finalize_model_grads([chunk])
        optimizer.step()
    chunk.finish_param_sync()
    synchronize(device)
    seconds = (time.perf_counter() - started) / STEPS
    kept = held_memory([chunk], optimizer, device).between_steps
    return float(loss.detach()), seconds, kept


def main() -> None:
    """Train at every stage and print the table on the first rank."""
    launch = read_launch()
    device = pick_device("auto", launch.local_rank)
    dist.init_process_group(backend_name(device))
    parallel_state.initialize_model_parallel()
    if launch.rank == 0:
        print("stage  strategy             loss     ms/step  MB kept per rank")
    for stage in range(4):
        loss, seconds, kept = train(stage, device)
        if launch.rank == 0:
            print(
                f"{stage:5}  {STRATEGIES[stage]:19} {loss:8.5f} {1000 * seconds:8.1f} "
                f"{kept / 2**20:8.2f}"
            )
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
