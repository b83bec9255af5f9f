"""The logits of the next token for a batch of texts, from a whole model or the stages of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mcore import device
from mcore.models.gpt import GPTModel
from mcore.topology.collectives import broadcast_, receive_, send
from mcore.topology.context import ParallelContext
from mcore.transformer.attention import SelfAttention
from mcore.transformer.kv_cache import KeyValueCache


class Decoder:
    """Feeds a batch of texts to a model, first the prompts and then token by token.

    Prompts of different lengths are padded on the left, so that all texts end at the same place.
    Padding is hidden from attention and has no positions. With a cache the model computes new
    tokens only; without one it computes the whole text again for every token.

    Args:
        model: this rank's stage, in evaluation mode, without `parallel_output` or sequence
            parallelism.
        prompts: token ids of each text, at least one.
        max_length: columns of the longest padded text that will be fed.
        ctx: groups; all its tensor- and pipeline-parallel ranks do the same at the same time.
        use_cache: keep keys and values.
    """

    def __init__(
        self,
        model: GPTModel,
        prompts: Sequence[Sequence[int]],
        *,
        max_length: int,
        ctx: ParallelContext,
        use_cache: bool = True,
    ) -> None:
        self._model, self._ctx = model, ctx
        self._device = next((p.device for p in model.parameters()), device.current_device())
        longest = max(map(len, prompts))
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self._tokens = torch.tensor(rows, device=self._device)  # [b, s]
        self._padding = torch.tensor(
            [longest - len(prompt) for prompt in prompts], device=self._device
        )
        self._is_padded = len({len(prompt) for prompt in prompts}) > 1
        self._fed = 0
        self._caches: dict[SelfAttention, KeyValueCache] = {}
        if use_cache:
            modules = (module for module in model.modules() if isinstance(module, SelfAttention))
            self._caches = {module: KeyValueCache(max_length) for module in modules}

    def append(self, tokens: Sequence[int]) -> None:
        """Add a token to every text."""
        column = torch.tensor(tokens, device=self._device)[:, None]
        self._tokens = torch.cat([self._tokens, column], dim=1)

    @torch.inference_mode()
    def next_logits(self) -> Tensor | None:
        """Logits of each text's next token, [b, v], on the last stage; None on others.

        Comm: those of the layers over tp; one message of [s, b, h] to the next stage.
        """
        first = self._fed if self._caches else 0
        new = self._tokens[:, first:]
        self._fed = self._tokens.shape[1]
        ctx, model = self._ctx, self._model
        if not ctx.pp.is_first:
            shape = (new.shape[1], new.shape[0], model.config.hidden_size)
            hidden = torch.empty(shape, dtype=model.config.pipeline_dtype, device=self._device)
            model.set_input_tensor(receive_(hidden, ctx.pp, ctx.pp.rank - 1))
        with self._attached():
            output: Tensor = model(
                new,
                self._positions(first) if self._is_padded or first else None,
                self._hidden(first) if self._is_padded else None,
                only_last_logits=True,
            )
        if ctx.pp.is_last:
            return output[:, -1]
        send(output, ctx.pp, ctx.pp.rank + 1)
        return None

    def agree(self, tokens: Sequence[int] | None) -> list[int]:
        """The tokens that the last stage chose, on every rank.

        Args:
            tokens: one for each text, on the last stage; others give None.

        Comm: a broadcast of b numbers over tp and one over pp.
        """
        chosen = torch.zeros(len(self._tokens), dtype=torch.int64, device=self._device)
        if tokens is not None:
            chosen = torch.tensor(tokens, device=self._device)
        broadcast_(chosen, self._ctx.tp)
        broadcast_(chosen, self._ctx.pp, src=self._ctx.pp.size - 1)
        return chosen.tolist()

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """The layers use this text's cache only while it is computed: a model serves many texts."""
        for attention, cache in self._caches.items():
            attention.cache = cache
        try:
            yield
        finally:
            for attention in self._caches:
                attention.cache = None

    def _positions(self, first: int) -> Tensor:
        """[b, s] of the columns from `first` on; texts that have ended stay at the last one."""
        columns = torch.arange(first, self._tokens.shape[1], device=self._device)
        positions = columns - self._padding[:, None]
        return positions.clamp(0, self._model.max_sequence_length - 1)

    def _hidden(self, first: int) -> Tensor:
        """[b, 1, s, k] bool, True where a query must not see a key.

        A padding query sees itself, since attention to nothing is not a number.
        """
        keys = torch.arange(self._tokens.shape[1], device=self._device)
        queries = keys[first:, None]
        is_padding = (keys < self._padding[:, None])[:, None, :]  # [b, 1, k]
        return ((keys > queries) | (is_padding & (keys != queries)))[:, None]
