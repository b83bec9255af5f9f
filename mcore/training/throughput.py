"""What a step computes, by a formula, and what share of the device's peak that is."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mcore import device
from mcore.config.transformer import TransformerConfig

#: Dense tensor-core peaks of 16-bit numbers in TFLOP/s, without sparsity, and those of float32
#: without TF32 (torch's default), from the vendor's data sheets. The first name that the device's
#: name contains counts.
PEAK_TFLOPS: tuple[tuple[str, float, float], ...] = (
    ("A100", 312.0, 19.5),
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100", 989.4, 66.9),
    ("H200 NVL", 835.0, 60.0),
    ("H200", 989.4, 66.9),
    ("GB200", 2500.0, 80.0),
    ("B200", 2250.0, 75.0),
)

_MEASURED_SIZE = 512
_MEASURED_TIMES = 4


def flops_per_token(model: TransformerConfig, seq_length: int, vocab_size: int) -> float:
    """Floating-point operations that training does for a token, backward included.

    Matrix products alone, two operations a multiply-add, three times the forward (once forward,
    twice backward). A causal query counts half the sequence; inside a sliding window what it sees.
    The vocabulary counts without padding and recomputation does not count, so that the figure does
    not depend on the layout.

    Args:
        model: sizes.
        seq_length: tokens per sample.
        vocab_size: without padding.
    """
    hidden, query = model.hidden_size, model.num_attention_heads * model.head_dim
    key_value = 2 * model.query_groups * model.head_dim
    matrices = 3 if model.gated_linear_unit else 2
    projections = hidden * (query + key_value) + query * hidden
    layer = projections + matrices * hidden * model.ffn_size
    whole = min(model.sliding_window_first_layer, model.num_layers)
    if model.sliding_window is None:
        whole = model.num_layers
    keys = whole * _keys_per_query(seq_length, None)
    keys += (model.num_layers - whole) * _keys_per_query(seq_length, model.sliding_window)
    return 6.0 * (model.num_layers * layer + 2 * query * keys + hidden * vocab_size)


def _keys_per_query(seq_length: int, window: int | None) -> float:
    """Mean over the sequence, with the diagonal counted half as in the usual causal s/2."""
    if window is None or window >= seq_length:
        return seq_length / 2
    return window - window * window / (2 * seq_length)


def known_peak(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a device in the table above, or None."""
    for name, half, single in PEAK_TFLOPS:
        if name in device_name:
            if dtype in (torch.bfloat16, torch.float16):
                return half * 1e12
            return single * 1e12 if dtype == torch.float32 else None
    return None


def measured_peak(dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> float:
    """FLOP/s of this process in a matrix product on the CPU: the best of a few."""
    a = torch.full((_MEASURED_SIZE, _MEASURED_SIZE), 0.5, dtype=dtype)
    seconds = []
    for _ in range(_MEASURED_TIMES):
        start = clock()
        torch.mm(a, a)
        seconds.append(clock() - start)
    return 2.0 * _MEASURED_SIZE**3 / min(seconds)


def peak(where: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that one rank's device could reach; None for a GPU that the table does not know."""
    if where.type == "cpu":
        return measured_peak(dtype)
    return known_peak(device.name_of(where), dtype)
