"""Forward, backward and optimizer of the model of a command line, and nothing else."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from mcore.config.run import resolve
from mcore.training.arguments import build_config, parse
from mcore.training.gpt import model_provider
from mcore.training.setup import Stage
from mcore.transformer import DropoutState


def main() -> None:
    record, *words = sys.argv[1:]
    config = build_config(parse(words))
    sizes = resolve(config, 1)
    stage = Stage(True, True, range(config.model.num_layers), None)
    model = model_provider(config, stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (sizes.micro_batch_size, sizes.seq_length + 1)
    vocabulary = config.tokenizer.vocab_size
    assert vocabulary is not None
    positions = torch.arange(sizes.seq_length).expand(shape[0], -1)
    dropout = DropoutState(0, 0, torch.zeros(shape[0], dtype=torch.int64))
    seconds = []
    for _ in range(sizes.train_iters):
        start = time.perf_counter()
        optimizer.zero_grad()
        for _ in range(sizes.num_microbatches):
            tokens = torch.randint(0, vocabulary, shape)
            inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            losses = model(inputs, positions, None, labels=labels, dropout_state=dropout)
            (losses.mean() / sizes.num_microbatches).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    Path(record).write_text(json.dumps(seconds), encoding="utf-8")


main()
