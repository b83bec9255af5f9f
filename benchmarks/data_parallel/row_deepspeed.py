"""Rows of DeepSpeed: `row_deepspeed.py SIZE STEPS STAGE`, on the CPU over gloo."""

from __future__ import annotations

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from reference_model import ReferenceGPT, mean_loss
from workload import BETAS, LEARNING_RATE, WEIGHT_DECAY, WORKLOADS, batches, join_world, time_steps


def main() -> None:
    work, steps, stage = WORKLOADS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    rank, world = join_world()
    torch.manual_seed(1234)
    model = ReferenceGPT(work, range(work.layers))
    micro_batches = work.global_batch // world // work.micro_batch
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": work.micro_batch,
            "gradient_accumulation_steps": micro_batches,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
    )
    pool, rows = batches(work), work.global_batch // world

    def step(i: int) -> float:
        total = 0.0
        for tokens in pool[i % len(pool)][rank * rows :][:rows].split(work.micro_batch):
            loss = mean_loss(engine(tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous())
            engine.backward(loss)
            engine.step()
            total += loss.item() / micro_batches
        return total

    time_steps(step, 3, steps)


main()
