"""Rows of mcore: the real training step at a layout.

`row_mcore.py SIZE STEPS TP PP [sp] [zero1|zero2|zero3] [overlap]`
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from workload import BETAS, LEARNING_RATE, WEIGHT_DECAY, WORKLOADS, Workload, batches, join_world
from workload import time_steps as time_steps_of

import pretrain_gpt
from mcore.config.distributed import STRATEGIES, DistributedDataParallelConfig
from mcore.config.gpt import GPTConfig
from mcore.config.optimizer import OptimizerConfig
from mcore.config.run import RunConfig, resolve
from mcore.config.tokenizer import TokenizerConfig
from mcore.config.training import TrainingConfig
from mcore.config.transformer import TransformerConfig
from mcore.topology.context import ParallelContext
from mcore.training.gpt import model_provider
from mcore.training.initialize import Launch, initialize
from mcore.training.setup import build_state
from mcore.training.step import StepFunctions
from mcore.transformer import DropoutState


@dataclass
class Stream:
    """Micro batches of the workload's random tokens."""

    work: Workload
    ctx: ParallelContext
    iteration: int = 0

    def __post_init__(self) -> None:
        self._batches = self._generate()

    def __next__(self) -> dict[str, Any]:
        return next(self._batches)

    def take_wait(self) -> float:
        return 0.0

    def _generate(self) -> Iterator[dict[str, Any]]:
        pool, step = batches(self.work), 0
        rows = self.work.global_batch // self.ctx.dp.size
        while True:
            own = pool[step % len(pool)][self.ctx.dp.rank * rows :][:rows]
            for tokens in own.split(self.work.micro_batch):
                yield {
                    "tokens": tokens[:, :-1].contiguous(),
                    "labels": tokens[:, 1:].contiguous(),
                    "loss_mask": torch.ones(tokens.shape[0], self.work.seq),
                    "dropout_state": DropoutState(0, 0, torch.zeros(1, dtype=torch.int64)),
                }
            step += 1


def main() -> None:
    size, steps, tp, pp = sys.argv[1], *map(int, sys.argv[2:5])
    sequence_parallel = "sp" in sys.argv
    stage = next((i for i in (1, 2, 3) if f"zero{i}" in sys.argv), 0)
    overlaps = "overlap" in sys.argv
    work = WORKLOADS[size]
    rank, world = join_world()
    config = RunConfig(
        model=TransformerConfig(
            num_layers=work.layers,
            hidden_size=work.hidden,
            num_attention_heads=work.heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            sequence_parallel=sequence_parallel,
        ),
        gpt=GPTConfig(untie_embeddings_and_output_weights=True),
        ddp=DistributedDataParallelConfig(
            data_parallel_sharding_strategy=STRATEGIES[stage],
            overlap_grad_reduce=overlaps,
            overlap_param_gather=overlaps and stage in (1, 2),
            num_buckets=4 if overlaps else None,
        ),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=work.vocab),
        training=TrainingConfig(
            micro_batch_size=work.micro_batch,
            global_batch_size=work.global_batch,
            seq_length=work.seq,
            train_iters=steps + 10,
        ),
        optimizer=OptimizerConfig(
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            clip_grad=0.0,
        ),
    )
    resolved = resolve(config, world)
    runtime = initialize(config, Launch(rank, world, rank))
    state = build_state(config, resolved, runtime, model_provider)
    functions = StepFunctions(pretrain_gpt.forward_step, resolved, runtime)
    streams: list[Any] = [Stream(work, runtime.ctx)]
    time_steps_of(lambda _: float(functions.train(state, streams).loss), 3, steps)


main()
