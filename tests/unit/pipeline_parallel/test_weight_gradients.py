"""B computes no weight gradient and W nothing else: counted by matrix products, on GPT stages."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore import parallel_state
from mcore.config.distributed import DistributedDataParallelConfig
from mcore.config.transformer import TransformerConfig
from mcore.distributed import DistributedDataParallel
from mcore.models.gpt import GPTModel, output
from mcore.pipeline_parallel import Schedule, ScheduleHooks, get_forward_backward_func
from mcore.pipeline_parallel.actions import Kind
from mcore.testing import run_distributed
from mcore.transformer import DropoutState

LAYERS, SEQ, MICROBATCHES, VOCABULARY = 2, 6, 3, 14
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "linear"}


class Products(TorchDispatchMode):
    """Counts matrix products, and those whose result has the shape of a weight."""

    def __init__(self, weight_shapes):
        super().__init__()
        self.weight_shapes = weight_shapes
        self.all = self.of_weights = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PRODUCTS:
            self.all += 1
            self.of_weights += tuple(result.shape) in self.weight_shapes
        return result


class Counting:
    """An observer that counts the products of each action."""

    def __init__(self, weight_shapes):
        self.weight_shapes = weight_shapes
        self.counts = {}

    @contextmanager
    def waiting(self, action):  # noqa: ARG002
        yield

    @contextmanager
    def running(self, action):
        with Products(self.weight_shapes) as products:
            yield
        self.counts[action] = (products.all, products.of_weights)


def wrap(config, module):
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    return DistributedDataParallel(config, ddp_config, module)


def build(num_chunks, fused, wrap=wrap, **options):
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=24,
        num_attention_heads=2,
        attention_dropout=0.0,
        gradient_accumulation_fusion=fused,
        **options,
    )
    per_chunk = LAYERS // num_chunks
    return [
        wrap(
            config,
            GPTModel(
                config,
                vocab_size=VOCABULARY,
                max_sequence_length=SEQ,
                pre_process=chunk == 0,
                post_process=chunk == num_chunks - 1,
                share_embeddings_and_output_weights=True,
                layer_range=range(chunk * per_chunk, (chunk + 1) * per_chunk),
                seed=3,
            ),
        )
        for chunk in range(num_chunks)
    ]


def forward_step(iterator, model):
    index = next(iterator)
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, VOCABULARY - 1, (2, SEQ + 1), generator=generator)
    state = DropoutState(1, 1, torch.tensor([2 * index, 2 * index + 1]))
    output = model(tokens[:, :-1], labels=tokens[:, 1:], dropout_state=state)
    return output, lambda loss: (loss.sum(), loss.numel())


def gradients(chunks, schedule):
    counting = Counting({tuple(p.shape) for c in chunks for p in c.parameters() if p.dim() == 2})
    for chunk in chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func(schedule=schedule)(
        forward_step_func=forward_step,
        data_iterator=[iter(range(MICROBATCHES)) for _ in chunks],
        model=chunks,
        num_microbatches=MICROBATCHES,
        seq_length=SEQ,
        micro_batch_size=2,
        hooks=ScheduleHooks(
            no_sync=lambda chunk: chunks[chunk].no_sync(),
            start_grad_sync=lambda chunk: chunks[chunk].start_grad_sync(),
            observer=counting,
        ),
    )
    grads = {
        (chunk, name): param.main_grad.clone()
        for chunk, ddp in enumerate(chunks)
        for name, param in ddp.module.named_parameters()
    }
    return grads, counting.counts


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("recompute", [False, True])
def test_b_runs_no_weight_product_and_w_exactly_those(name, fused, recompute):
    num_chunks = 2 if name == "zb-v" else 1
    options = {"gated_linear_unit": True, "add_bias_linear": not fused}
    if recompute:
        options |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    whole = Schedule(name="no-pipelining", num_chunks=num_chunks)
    wanted, unsplit = gradients(build(num_chunks, fused, **options), whole)
    got, counts = gradients(
        build(num_chunks, fused, **options), Schedule(name=name, num_chunks=num_chunks)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)

    assert Counter(a.kind for a in counts) == dict.fromkeys(Kind, num_chunks * MICROBATCHES)
    for action, (products, of_weights) in counts.items():
        linears = 4 * LAYERS // num_chunks + (action.chunk == num_chunks - 1)
        again = (linears - (action.chunk == num_chunks - 1)) * recompute
        if action.kind is Kind.WEIGHT:
            assert (products, of_weights) == (linears, linears)
        elif action.kind is Kind.BACKWARD:
            assert (products, of_weights) == (linears + again, 0)
            assert unsplit[action] == (2 * linears + again, linears)


def products_at_two_ranks(name):
    """Largest difference of gradients, and the products of each action, on a tp rank."""
    parallel_state.initialize_model_parallel(2, 1)
    num_chunks = 2 if name == "zb-v" else 1
    options = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    whole = Schedule(name="no-pipelining", num_chunks=num_chunks)
    wanted, _ = gradients(build(num_chunks, True, **options), whole)
    got, counts = gradients(
        build(num_chunks, True, **options), Schedule(name=name, num_chunks=num_chunks)
    )
    worst = max(float((got[key] - wanted[key]).abs().max()) for key in wanted)
    return worst, {str(action): counted for action, counted in counts.items()}


@pytest.mark.dist
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_the_split_holds_with_sequence_parallelism(name):
    num_chunks = 2 if name == "zb-v" else 1
    for worst, counts in run_distributed(products_at_two_ranks, 2, name, timeout=60):
        assert worst <= 1e-5
        assert len(counts) == 3 * num_chunks * MICROBATCHES
        for action, counted in counts.items():
            linears = 4 * LAYERS // num_chunks + (action[1] == str(num_chunks - 1))
            wanted = {"F": (linears, 0), "B": (linears, 0), "W": (linears, linears)}
            assert counted == wanted[action[0]], action


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_head_that_is_fused_by_itself_is_split_at_one_product_more(monkeypatch, name, fused):
    num_chunks = 2 if name == "zb-v" else 1
    whole = Schedule(name="no-pipelining", num_chunks=num_chunks)
    wanted, _ = gradients(build(num_chunks, fused), whole)
    monkeypatch.setattr(output, "FUSE_FROM", 0)
    got, counts = gradients(build(num_chunks, fused), Schedule(name=name, num_chunks=num_chunks))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    layers = 4 * LAYERS // num_chunks
    for action, counted in counts.items():
        has_head = action.chunk == num_chunks - 1
        if action.kind is Kind.WEIGHT:  # the logits anew once more
            assert counted == (layers + 2 * has_head, layers + has_head)
        elif action.kind is Kind.BACKWARD:
            assert counted == (layers + 2 * has_head, 0)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_a_head_fused_with_the_loss_keeps_its_own_weight_product_in_b(name):
    """Where it was asked for: to split it costs more than there is to gain; see ADR 3."""
    num_chunks = 2 if name == "zb-v" else 1
    options = {"cross_entropy_loss_fusion": True}
    whole = Schedule(name="no-pipelining", num_chunks=num_chunks)
    wanted, _ = gradients(build(num_chunks, True, **options), whole)
    got, counts = gradients(
        build(num_chunks, True, **options), Schedule(name=name, num_chunks=num_chunks)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    layers = 4 * LAYERS // num_chunks
    for action, counted in counts.items():
        has_head = action.chunk == num_chunks - 1
        if action.kind is Kind.WEIGHT:
            assert counted == (layers, layers)
        elif action.kind is Kind.BACKWARD:  # the logits anew, and the two products with them
            assert counted == (layers + 3 * has_head, has_head)


def test_a_weight_without_main_grad_gets_its_grad():
    chunks = build(1, False, wrap=lambda _, module: module)
    results = []
    for name in ("no-pipelining", "zb-h1"):
        for param in chunks[0].parameters():
            param.grad = None
        get_forward_backward_func(schedule=Schedule(name=name))(
            forward_step_func=forward_step,
            data_iterator=iter(range(2)),
            model=chunks,
            num_microbatches=2,
            seq_length=SEQ,
            micro_batch_size=2,
        )
        results.append({n: p.grad.clone() for n, p in chunks[0].named_parameters()})
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
