"""Whether a converted model computes what the other program's does: the logits of both."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from mcore.generation import load_model

_TOKENS = 64
_SEED = 1234


def largest_logit_difference(
    checkpoint: str | os.PathLike[str], hf_dir: str | os.PathLike[str], iteration: int | None = None
) -> float | None:
    """Largest absolute difference of the two models' logits on random tokens, both in float32.

    Args:
        checkpoint: save root, or the directory of one iteration.
        hf_dir: the Hugging Face folder.
        iteration: which one; None = the one that the pointer names.

    Returns:
        None where the transformers library is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    ours = load_model(checkpoint, iteration).model
    theirs = AutoModelForCausalLM.from_pretrained(
        Path(hf_dir), dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()
    length = min(_TOKENS, ours.max_sequence_length)
    if ours.config.sliding_window is not None:  # far enough for the window to matter
        length = min(max(length, ours.config.sliding_window + 16), ours.max_sequence_length, 4096)
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(ours.vocab_size, (2, length), generator=generator)
    with torch.no_grad():
        difference = ours(tokens).double() - theirs(tokens).logits.double()
    return float(difference.abs().max())
