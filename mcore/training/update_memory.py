"""Bytes that an optimizer step needs for a moment, from the options."""

from __future__ import annotations

from collections.abc import Sequence

from mcore.config.run import RunConfig
from mcore.optimizer.gradients import at_once
from mcore.training.parameter_count import ParameterCount, fc1_size, qkv_size, vocabulary_rows

#: Temporaries in fp32 of one element's update, beside its widened gradient, by rule.
_TEMPORARIES = {"adam": 0, "sgd": 4, "lion": 5}

#: In fp32 of one element of a matrix that Muon orthogonalises: its direction, its place among the
#: matrices that are dealt, and two in the iteration, with two Gram matrices beside them.
_IN_ITERATION, _GRAMS = 2, 2


def update_workspace(
    config: RunConfig, counts: Sequence[ParameterCount], *, ranks: int, stage: int
) -> int:
    """Bytes beside what is held between steps, at the largest moment of an update.

    Args:
        config: rule and precisions.
        counts: parameters of this rank's chunks.
        ranks: that share the optimizer state.
        stage: ZeRO stage; with 3 shards of gradients are wide.
    """
    options, rule = config.optimizer, config.optimizer.optimizer
    main = max(config.model.params_dtype.itemsize, 4)
    own = sum(count.total for count in counts) // ranks
    is_wide = (
        config.ddp.keeps_grads_wide or stage == 3 or config.model.params_dtype.itemsize == main
    )
    widened = 0 if is_wide else main
    if rule in ("sgd", "lion"):
        largest = max((_largest(config, count) for count in counts), default=0)
        return at_once(min(own, largest)) * (widened + _TEMPORARIES[rule] * main)
    narrow = [dtype == "bf16" for dtype in (options.exp_avg_dtype, options.exp_avg_sq_dtype)]
    by_adam = own
    if rule == "muon":
        by_adam -= sum(count.matrices for count in counts) // ranks
    needed = at_once(by_adam) * (widened + main * sum(narrow))
    return max(needed, _muon_workspace(config, counts, ranks)) if rule == "muon" else needed


def _muon_workspace(config: RunConfig, counts: Sequence[ParameterCount], ranks: int) -> int:
    """Of a batch of the largest matrices, one for each rank that shares them."""
    model, h = config.model, config.model.hidden_size
    if not any(count.layers for count in counts):
        return 0
    tp = model.tensor_model_parallel_size
    main = max(model.params_dtype.itemsize, 4)
    shapes = [(tp * fc1_size(config), h), (tp * qkv_size(config), h)]
    rows, columns = max(shapes)
    whole, together = rows * columns, ranks * tp
    gram = min(rows, columns) ** 2
    scattered = whole if together > 1 else 0
    dealt = together * whole + scattered
    return main * (whole + dealt + _IN_ITERATION * whole + _GRAMS * gram)


def _largest(config: RunConfig, count: ParameterCount) -> int:
    """Elements of the largest parameter of a chunk."""
    h = config.model.hidden_size
    words = vocabulary_rows(config) * h if count.embedding or count.output else 0
    return max(words, h * max(fc1_size(config), qkv_size(config)) if count.layers else 0)
