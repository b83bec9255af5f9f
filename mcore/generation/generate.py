"""Continue texts, a token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mcore.errors import DataError
from mcore.generation.decoder import Decoder
from mcore.generation.sampling import Sampling, choose_token
from mcore.models.gpt import GPTModel
from mcore.topology.context import ParallelContext


def generate(
    model: GPTModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 1234,
    stop_id: int | None = None,
    ctx: ParallelContext | None = None,
    use_cache: bool = True,
) -> Iterator[int]:
    """The tokens that follow a prompt, each as soon as it is chosen.

    Arguments and errors are those of `generate_batch`, for one text.
    """
    steps = generate_batch(
        model,
        [prompt],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seeds=[seed],
        stop_id=stop_id,
        ctx=ctx,
        use_cache=use_cache,
    )
    return (token for (token,) in steps if token is not None)


def generate_batch(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
    stop_id: int | None = None,
    ctx: ParallelContext | None = None,
    use_cache: bool = True,
) -> Iterator[list[int | None]]:
    """The tokens that follow several prompts, step by step.

    A text ends with `stop_id`, after `max_new_tokens`, or when it fills the model's positions (its
    last token is then the one after the last position). What is chosen for a text depends on its
    prompt and seed, not on the others. On several ranks all of them call this with the same
    arguments, get the same tokens, and have to take the same number of steps.

    Args:
        model: whole, or this rank's stage; in evaluation mode, `parallel_output` off.
        prompts: token ids of each, at least one; lengths may differ.
        max_new_tokens: how many follow at most.
        sampling: how to choose; None = plain sampling.
        seeds: of the choice, one for each prompt; 1234, 1235, ... when None.
        stop_id: a token that ends a text; it is not returned.
        ctx: groups, where the model is spread over ranks; None = it is whole.
        use_cache: keep keys and values rather than compute the whole text for every token.

    Returns:
        For each step the new token of every text, None where it has ended.

    Raises:
        DataError: a prompt is empty, longer than the model's positions, or has ids outside the
            vocabulary.
    """
    for number, prompt in enumerate(prompts, 1):
        problem = prompt_problem(prompt, model)
        if problem is not None:
            raise DataError(f"prompt {number} {problem}")
    limits = [
        min(max_new_tokens, model.max_sequence_length + 1 - len(prompt)) for prompt in prompts
    ]
    if not prompts or max_new_tokens < 1:
        return iter(())
    decoder = Decoder(
        model,
        prompts,
        max_length=max(map(len, prompts)) + max(limits) - 1,
        ctx=ParallelContext.single() if ctx is None else ctx,
        use_cache=use_cache,
    )
    chooser = _Chooser(sampling or Sampling(), seeds or range(1234, 1234 + len(prompts)))
    return _steps(decoder, chooser, limits, stop_id)


def prompt_problem(prompt: Sequence[int], model: GPTModel) -> str | None:
    """Why a model cannot continue a prompt, in words that follow the prompt's name.

    Args:
        prompt: token ids.
        model: whole, or a stage.
    """
    if not prompt:
        return "has no tokens; give some text to continue"
    if len(prompt) > model.max_sequence_length:
        return (
            f"has {len(prompt)} tokens, but the model has {model.max_sequence_length} positions "
            "(max_position_embeddings); shorten it"
        )
    outside = [token for token in prompt if not 0 <= token < model.vocab_size]
    if outside:
        return (
            f"has token {outside[0]}, but the model knows 0 to {model.vocab_size - 1}: the "
            "tokenizer is not the one that it was trained with"
        )
    return None


class _Chooser:
    """Chooses tokens for every text, each with random numbers of its own."""

    def __init__(self, sampling: Sampling, seeds: Sequence[int]) -> None:
        self._sampling = sampling
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def choose(self, logits: Tensor, is_open: Sequence[bool]) -> list[int]:
        """A token for each row of logits, [b, v]; 0 for texts that have ended."""
        rows = zip(logits, self._generators, is_open, strict=True)
        return [
            choose_token(row, self._sampling, generator) if wanted else 0
            for row, generator, wanted in rows
        ]


def _steps(
    decoder: Decoder, chooser: _Chooser, limits: list[int], stop_id: int | None
) -> Iterator[list[int | None]]:
    is_open = [True] * len(limits)
    chosen: list[int] = []
    for step in range(max(limits)):
        if chosen:
            decoder.append(chosen)
        logits = decoder.next_logits()
        chosen = decoder.agree(None if logits is None else chooser.choose(logits, is_open))
        is_open = [
            was and step < limit and token != stop_id
            for was, limit, token in zip(is_open, limits, chosen, strict=True)
        ]
        if not any(is_open):
            return
        yield [token if still else None for token, still in zip(chosen, is_open, strict=True)]
