"""Nearest orthogonal matrix by products alone: what Muon does to the momentum of a weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Coefficients = Sequence[tuple[float, float, float]]

#: Coefficients (a, b, c) of the steps; with more steps than entries they come round again.
#: simple: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks";
#: quintic: one triple for each of five steps, from the same authors' GPT-2 speed runs.
COEFFICIENTS: dict[str, Coefficients] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}

#: The norm that a matrix is divided by is at least this, so that zero stays zero.
_EPSILON = 1e-7


def orthogonalize(matrix: Tensor, steps: int, coefficients: Coefficients) -> Tensor:
    """About U V^T of the decomposition U S V^T: singular values near 1 in place of S.

    X = G / |G|, then `steps` times X = a X + (b A + c A^2) X with A = X X^T.

    Args:
        matrix: G, [rows, columns], any float dtype; not modified. The products have its dtype.
        steps: iterations.
        coefficients: (a, b, c) of each.
    """
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.t()  # the smaller Gram matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=_EPSILON)
    for step in range(steps):
        a, b, c = coefficients[step % len(coefficients)]
        gram = x @ x.t()
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x if wide else x.t()


def update_scale(rows: int, columns: int, mode: str) -> float:
    """What an orthogonal update is multiplied by, by Megatron's names.

    | mode | factor |
    |---|---|
    | spectral | sqrt(max(rows, columns)): the size of an Adam update when multiplied by 0.2 |
    | unit_rms_norm | sqrt(rows / columns) |
    | shape_scaling | sqrt(max(1, rows / columns)) |

    Args:
        rows: output features.
        columns: input features.
        mode: as in the table.
    """
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(ratio if mode == "unit_rms_norm" else max(1.0, ratio))


def split_rows(matrix: Tensor, parts: Sequence[int]) -> list[Tensor]:
    """The kinds of rows of a matrix whose rows repeat in runs of these lengths, each [n, columns].

    The projection to queries, keys and values is dealt so: each head group's queries, key, value.
    """
    period, columns = sum(parts), matrix.shape[1]
    runs = matrix.view(-1, period, columns).split(list(parts), dim=1)
    return [run.reshape(-1, columns) for run in runs]


def join_rows(kinds: Sequence[Tensor], parts: Sequence[int]) -> Tensor:
    """The inverse of `split_rows`."""
    columns = kinds[0].shape[1]
    runs = [kind.view(-1, part, columns) for kind, part in zip(kinds, parts, strict=True)]
    return torch.cat(runs, dim=1).view(-1, columns)
