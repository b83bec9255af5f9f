"""A tiny training run of the real parts, with numbers instead of a corpus.

Model, schedule, data-parallel wrapper, optimizer and checkpoints are those of `pretrain_gpt.py`.
Everything is float64, where layouts differ by rounding alone: what is wrong shows by many orders
of magnitude.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mcore.config.run import RunConfig, resolve
from mcore.models.gpt import GPTModel
from mcore.topology.context import ParallelContext
from mcore.training.arguments import build_config, parse
from mcore.training.initialize import Runtime
from mcore.training.pipeline_plan import plan_pipeline
from mcore.training.setup import Stage, TrainState, build_state
from mcore.training.step import StepFunctions
from mcore.transformer import DropoutState

#: Sizes with many divisors, so that most numbers of ranks can share them.
_MODEL = (
    "--hidden-size 96 --num-attention-heads 24 --ffn-hidden-size 192 "
    "--seq-length 24 --tokenizer-type NullTokenizer --vocab-size 211 "
    "--make-vocab-size-divisible-by 8 --lr 1e-3 --train-iters 100 --init-method-std 0.1 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --log-params-norm --no-save-rng --no-load-rng"
)
_VOCABULARY, _LENGTH = 211, 24


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What a step computed: loss, norm of its gradient, norm of the parameters after it."""

    loss: float
    grad_norm: float
    params_norm: float


class TinyTraining:
    """Trains the model at one layout.

    Args:
        words: flags of the layout and what else differs.
        ctx: groups, of the same layout.
        device: where tensors live.
        batch: samples of a global batch.
        micro_batch: samples of a microbatch.
    """

    def __init__(
        self,
        words: str,
        ctx: ParallelContext,
        device: torch.device,
        *,
        batch: int,
        micro_batch: int = 1,
    ) -> None:
        sizes = f"--global-batch-size {batch} --micro-batch-size {micro_batch}"
        layers = 12 if batch % 3 == 0 else 4  # the reference has the same batch and model
        flags = f"--num-layers {layers} {_MODEL} {sizes} {words}".split()
        self.config = _in_float64(build_config(parse(flags)))
        resolved = resolve(self.config, ctx.layout.world_size)
        runtime = Runtime(ctx, device, False, plan_pipeline(self.config))
        self.ctx = ctx
        self.state: TrainState = build_state(
            self.config, resolved, runtime, partial(_build_model, ctx)
        )
        self._steps = StepFunctions(_forward_step, resolved, runtime)
        self._device, self._batch, self._micro_batch = device, batch, micro_batch

    def step(self) -> Step:
        """Train one step; every rank of the layout takes part."""
        streams: list[Any] = [self._samples() for _ in self.state.stages]
        outcome = self._steps.train(self.state, streams)
        return Step(
            float(outcome.loss), float(outcome.grad_norm), float(outcome.watched["params_norm"])
        )

    def _samples(self) -> _Samples:
        dp = self.ctx.dp
        first = self.state.consumed_train_samples + dp.rank * self._micro_batch
        starts = range(first, first + self._batch, self._micro_batch * dp.size)
        return _Samples([range(s, s + self._micro_batch) for s in starts], self._device)


class _Samples:
    """The microbatches of one step, as `BatchStream` gives them."""

    def __init__(self, microbatches: list[range], device: torch.device) -> None:
        self.iteration = 0
        self._left = iter(microbatches)
        self._device = device

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        numbers = next(self._left)
        rows = []
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            rows.append(torch.randint(_VOCABULARY, (_LENGTH + 1,), generator=generator))
        tokens = torch.stack(rows).to(self._device)
        samples = torch.tensor(list(numbers), device=self._device)
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "dropout_state": DropoutState(1234, self.iteration, samples),
        }

    def take_wait(self) -> float:
        """Nothing is waited for."""
        return 0.0


def _in_float64(config: RunConfig) -> RunConfig:
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, params_dtype=torch.float64)
    )


def _build_model(ctx: ParallelContext, config: RunConfig, stage: Stage) -> GPTModel:
    return GPTModel(
        config.model,
        vocab_size=_VOCABULARY,
        max_sequence_length=_LENGTH,
        pre_process=stage.pre_process,
        post_process=stage.post_process,
        share_embeddings_and_output_weights=True,
        make_vocab_size_divisible_by=config.tokenizer.make_vocab_size_divisible_by,
        layer_range=stage.layers,
        vp_stage=stage.vp_stage,
        seed=config.training.seed,
        tp_group=ctx.tp,
    )


def _loss(output: Tensor) -> tuple[Tensor, Tensor]:
    count = torch.full((), output.numel(), dtype=torch.float64, device=output.device)
    return output.sum(dtype=torch.float64), count


def _forward_step(
    data_iterator: Iterator[dict[str, Any]], model: nn.Module
) -> tuple[Tensor, partial[tuple[Tensor, Tensor]]]:
    batch = next(data_iterator)
    output = model(batch["tokens"], labels=batch["labels"], dropout_state=batch["dropout_state"])
    return output, partial(_loss)
