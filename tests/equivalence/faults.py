"""Faults put into training from outside: through the providers of a program and its corpus."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mcore.data import IndexedDatasetBuilder
from mcore.log import get_logger
from mcore.training.batches import BatchStream
from mcore.training.gpt import datasets_provider, model_provider
from mcore.training.pretrain import Providers
from pretrain_gpt import forward_step
from tests.equivalence.tiny import EOD

#: The document that no other is like.
POISONED = 60


@dataclass
class NanGradient:
    """A forward step after which one rank's gradient is not a number.

    Attributes:
        rank: the faulty rank.
        iteration: when; None = always.
        times: how often; a computation that is repeated more often comes out right.
    """

    rank: int
    iteration: int | None
    times: int

    def __call__(self, stream: BatchStream, model: nn.Module) -> Any:
        output, loss_func = forward_step(stream, model)
        rank = dist.get_rank() if dist.is_initialized() else 0
        due = self.iteration in (None, stream.iteration) and self.times > 0
        if rank == self.rank and due:
            self.times -= 1
            output.register_hook(lambda gradient: gradient * float("nan"))
        return output, loss_func

    def providers(self) -> Providers:
        return Providers(datasets_provider, model_provider, self)


@dataclass
class NanActivation:
    """A forward step in which one rank's input of a row-parallel layer is not a number.

    Attributes:
        rank: the faulty rank.
        iteration: when.
    """

    rank: int
    iteration: int

    def __call__(self, stream: BatchStream, model: nn.Module) -> Any:
        if dist.get_rank() != self.rank or stream.iteration != self.iteration:
            return forward_step(stream, model)
        layers = [m for name, m in model.named_modules() if name.endswith("mlp.linear_fc2")]
        spoiled = layers[0].register_forward_pre_hook(
            lambda _, inputs: (inputs[0] * torch.nan,), prepend=True
        )
        try:
            return forward_step(stream, model)
        finally:
            spoiled.remove()

    def providers(self) -> Providers:
        return Providers(datasets_provider, model_provider, self)


@dataclass
class SlowForward:
    """A forward step that one rank sleeps in.

    Attributes:
        rank: the slow rank.
        seconds: that it sleeps.
        log: where rank 0 copies the log to.
    """

    rank: int
    seconds: float
    log: Path

    def __call__(self, stream: BatchStream, model: nn.Module) -> Any:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank == 0 and not self.log.exists():
            get_logger().addHandler(logging.FileHandler(self.log))
        if rank == self.rank:
            time.sleep(self.seconds)
        return forward_step(stream, model)

    def providers(self) -> Providers:
        return Providers(datasets_provider, model_provider, self)


def write_poisoned_corpus(prefix: Path, documents: int = 140) -> str:
    """Documents of one token, and one document of tokens that occur nowhere else."""
    generator = np.random.default_rng(3)
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for number in range(documents):
            length = 40 if number == POISONED else int(generator.integers(10, 30))
            tokens = np.ones(length, np.int64)
            if number == POISONED:
                tokens = generator.integers(60, 100, length)
            builder.add_item([*tokens.tolist(), EOD])
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
    return str(prefix)
