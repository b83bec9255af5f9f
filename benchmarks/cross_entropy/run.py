"""Output layer and cross entropy at a large vocabulary: peak bytes and time, three ways.

python benchmarks/cross_entropy/run.py [--tokens 512] [--hidden 512] [--vocabulary 128000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mcore.models.gpt.output import FUSED_CHUNK
from mcore.tensor_parallel.cross_entropy import (
    CHUNK_ELEMENTS,
    LossOptions,
    vocab_parallel_cross_entropy,
)
from mcore.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from mcore.topology.group import Group

Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def torch_head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target, reduction="none")


def chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return vocab_parallel_cross_entropy(F.linear(hidden, weight), target)


def fused(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    rows = weight.shape[0]
    options = LossOptions(Group.single("tp"), rows, rows, chunk_elements=FUSED_CHUNK)
    loss = linear_cross_entropy(
        hidden.unsqueeze(1),
        weight,
        target.unsqueeze(1),
        options,
        sequence_parallel=False,
        gradient_accumulation_fusion=False,
    )
    return loss.squeeze(1)


def formulas(tokens: int, hidden: int, vocabulary: int) -> dict[str, int]:
    """Bytes of float32 tensors at the largest moment, from forward to both gradients."""
    logits, product = 4 * tokens * vocabulary, 4 * vocabulary * hidden
    chunk = 4 * min(CHUNK_ELEMENTS, tokens * vocabulary)
    step = max(1, FUSED_CHUNK // vocabulary)
    of_hidden = 4 * tokens * hidden
    return {
        # log-softmax, its gradient, the logits' gradient
        "torch": 3 * logits,
        # the logits and their gradient; or the latter and the products with it
        "chunked": max(2 * logits + chunk, logits + product + of_hidden),
        # one chunk beside the weight's gradient
        "fused": 4 * min(step, tokens) * vocabulary + product + of_hidden,
    }


def run(head: Head, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    hidden.grad = weight.grad = None
    loss = head(hidden, weight, target)
    loss.mean().backward()
    return loss.detach()


def peak_of(work: Callable[[], object]) -> int:
    """Most bytes that torch's allocator gave out beyond what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, requires_grad=True)
    weight = (torch.randn(options.vocabulary, options.hidden) * 0.02).requires_grad_()
    target = torch.randint(options.vocabulary, (options.tokens,))
    heads: dict[str, Head] = {"torch": torch_head, "chunked": chunked, "fused": fused}
    predicted = formulas(options.tokens, options.hidden, options.vocabulary)
    reference: list[Tensor] = []
    peaks: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in heads}
    for name, head in heads.items():
        peaks[name] = peak_of(partial(run, head, hidden, weight, target))
        loss = run(head, hidden, weight, target)
        assert hidden.grad is not None
        assert weight.grad is not None
        results = [loss, hidden.grad, weight.grad]
        reference = reference or [result.clone() for result in results]
        worst = [
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(results, reference, strict=True)
        ]
        print(f"{name}: difference from torch's, of the largest: {worst}", flush=True)
    for _ in range(options.rounds):
        for name, head in heads.items():
            start = time.perf_counter()
            run(head, hidden, weight, target)
            times[name].append(time.perf_counter() - start)
    print("head | peak MiB | formula MiB | seconds, median (best)")
    for name in heads:
        spent = f"{statistics.median(times[name]):.2f} ({min(times[name]):.2f})"
        mib = f"{peaks[name] / 2**20:.0f} | {predicted[name] / 2**20:.0f}"
        print(f"{name} | {mib} | {spent}")


if __name__ == "__main__":
    main()
