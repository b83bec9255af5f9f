"""Continue a sequence of tokens, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mcore.errors import DataError
from mcore.generation.sampling import Sampling, choose_token
from mcore.models.gpt import GPTModel


def generate(
    model: GPTModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 1234,
    stop_id: int | None = None,
) -> Iterator[int]:
    """The tokens that follow a prompt, each as soon as it is chosen.

    The whole context runs through the model for every token. Once it is longer than the model's
    positions, the oldest tokens fall out of it.

    Args:
        model: whole, in evaluation mode, `parallel_output` off.
        prompt: token ids, at least one.
        max_new_tokens: how many follow at most.
        sampling: how to choose; None = plain sampling.
        seed: of the choice; the same seed gives the same tokens.
        stop_id: a token that ends the text; it is not returned.

    Raises:
        DataError: the prompt is empty or has ids outside the vocabulary.
    """
    if not prompt:
        raise DataError("the prompt has no tokens; give some text to continue")
    outside = [token for token in prompt if not 0 <= token < model.vocab_size]
    if outside:
        raise DataError(
            f"the prompt has token {outside[0]}, but the model knows 0 to {model.vocab_size - 1}: "
            "the tokenizer is not the one that it was trained with"
        )
    return _continue(model, list(prompt), max_new_tokens, sampling or Sampling(), seed, stop_id)


def _continue(
    model: GPTModel,
    context: list[int],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    stop_id: int | None,
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    for _ in range(max_new_tokens):
        window = torch.tensor([context[-model.max_sequence_length :]], device=device)
        with torch.inference_mode():
            logits = model(window)[0, -1]  # [1, s, v] -> [v]
        token = choose_token(logits, sampling, generator)
        if token == stop_id:
            return
        context.append(token)
        yield token
