"""Rows of other libraries: `row_torch.py SIZE STEPS KIND`.

KIND = hf plain ddp zero1 fsdp2 tp pp_1f1b
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from reference_model import ReferenceGPT, mean_loss
from torch import Tensor, nn
from workload import BETAS, LEARNING_RATE, WEIGHT_DECAY, WORKLOADS, Workload, batches, join_world
from workload import time_steps as time_steps_of

Step = Callable[[int], float | None]
Context = Callable[[], contextlib.AbstractContextManager[object]]


OPTIONS = {"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": WEIGHT_DECAY}


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW; the fused kernel where the parameters are plain tensors, as mcore uses it."""
    options = OPTIONS
    plain = [p for p in params if type(p.data) is Tensor]
    if len(plain) == len(params):
        return torch.optim.AdamW(params, fused=True, **options)
    cut = [p for p in params if type(p.data) is not Tensor]
    return torch.optim.AdamW([{"params": group} for group in (plain, cut) if group], **options)


def accumulate(
    work: Workload,
    loss_of: Callable[[Tensor], Tensor],
    params: list[nn.Parameter],
    *,
    rank: int = 0,
    ranks: int = 1,
    no_sync: Context = contextlib.nullcontext,
    around: Context = contextlib.nullcontext,
    optimizer: torch.optim.Optimizer | None = None,
) -> Step:
    """A step that accumulates over this data-parallel rank's micro batches."""
    pool, rows = batches(work), work.global_batch // ranks
    optimizer = optimizer or adamw(params)

    def step(i: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        micro = pool[i % len(pool)][rank * rows :][:rows].split(work.micro_batch)
        total = 0.0
        for k, tokens in enumerate(micro):
            with contextlib.nullcontext() if k == len(micro) - 1 else no_sync(), around():
                loss = loss_of(tokens) / len(micro)
                loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def hugging_face(work: Workload) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=work.vocab,
            n_positions=work.seq,
            n_embd=work.hidden,
            n_layer=work.layers,
            n_head=work.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).train()

    def loss_of(tokens: Tensor) -> Tensor:
        # The labels are shifted inside; it gets as many tokens as every other row.
        inputs = tokens[:, :-1].contiguous()
        return model(input_ids=inputs, labels=inputs).loss

    return accumulate(work, loss_of, list(model.parameters()))


def plain(work: Workload) -> Step:
    model = ReferenceGPT(work, range(work.layers))
    return accumulate(work, _loss(model), list(model.parameters()))


def data_parallel(work: Workload, rank: int, world: int) -> Step:
    model = nn.parallel.DistributedDataParallel(
        ReferenceGPT(work, range(work.layers)), gradient_as_bucket_view=True
    )
    params = list(model.parameters())
    return accumulate(work, _loss(model), params, rank=rank, ranks=world, no_sync=model.no_sync)


def zero_redundancy(work: Workload, rank: int, world: int) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(
        ReferenceGPT(work, range(work.layers)), gradient_as_bucket_view=True
    )
    params = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, fused=True, **OPTIONS)
    return accumulate(
        work,
        _loss(model),
        params,
        rank=rank,
        ranks=world,
        no_sync=model.no_sync,
        optimizer=optimizer,
    )


def fully_sharded(work: Workload, rank: int, world: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = ReferenceGPT(work, range(work.layers))
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    # Every parameter is a DTensor over the same mesh, which the fused kernel takes.
    optimizer = torch.optim.AdamW(params, fused=True, **OPTIONS)
    # As mcore and DeepSpeed at this stage it reduces every micro batch: no memory for more.
    return accumulate(work, _loss(model), params, rank=rank, ranks=world, optimizer=optimizer)


def tensor_parallel(work: Workload, world: int) -> Step:
    from torch.distributed.tensor.parallel import loss_parallel

    model = ReferenceGPT(work, range(work.layers))
    _cut(model, world)
    return accumulate(work, _loss(model), list(model.parameters()), around=loss_parallel)


def _cut(model: ReferenceGPT, world: int) -> None:
    """Apply torch's tensor-parallel plan to the model, activations replicated between layers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh, layout = init_device_mesh("cpu", (world,)), Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
            "head": ColwiseParallel(
                input_layouts=layout, output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.blocks:
        plan = {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=layout),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=layout),
        }
        parallelize_module(block, mesh, plan)


def pipeline(work: Workload, rank: int, world: int) -> Step:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import Schedule1F1B

    per_stage = work.layers // world
    layers = range(rank * per_stage, (rank + 1) * per_stage)
    first, last = rank == 0, rank == world - 1
    model = ReferenceGPT(work, layers, embeds=first, has_head=last)
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, work.global_batch // work.micro_batch, loss_fn=mean_loss)
    optimizer, pool = adamw(list(model.parameters())), batches(work)

    def step(i: int) -> float | None:
        tokens = pool[i % len(pool)]
        losses: list[Tensor] = []
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        optimizer.zero_grad(set_to_none=True)
        if first:
            schedule.step(inputs)
        else:
            schedule.step(**({"target": labels, "losses": losses} if last else {}))
        optimizer.step()
        return float(torch.stack(losses).mean()) if losses else None

    return step


def _loss(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda tokens: mean_loss(model(tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous())


def main() -> None:
    work, steps, kind = WORKLOADS[sys.argv[1]], int(sys.argv[2]), sys.argv[3]
    rank, world = join_world()
    torch.manual_seed(1234)
    step = {
        "hf": lambda: hugging_face(work),
        "plain": lambda: plain(work),
        "ddp": lambda: data_parallel(work, rank, world),
        "zero1": lambda: zero_redundancy(work, rank, world),
        "fsdp2": lambda: fully_sharded(work, rank, world),
        "tp": lambda: tensor_parallel(work, world),
        "pp_1f1b": lambda: pipeline(work, rank, world),
    }[kind]()
    time_steps_of(step, 3, steps)
    if dist.is_initialized():
        dist.destroy_process_group()


main()
