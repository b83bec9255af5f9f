"""The formula against counts that were written down by hand, and against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mcore.config.transformer import TransformerConfig
from mcore.models.gpt import GPTModel
from mcore.training.throughput import flops_per_token, known_peak, measured_peak


def config(**options):
    sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256}
    return TransformerConfig(**(sizes | options))


#: name: (options, sequence, vocabulary, forward operations of a token, matrix by matrix)
COUNTS = {
    # per layer q 64x64, k and v 64x32 each, scores and values 64 x 64/2 keys each, out, two MLPs
    "grouped": (
        {"num_query_groups": 2}, 64, 128,
        2 * (4 * (64 * 64 + 2 * 64 * 32 + 2 * 64 * 32 + 64 * 64 + 2 * 64 * 256) + 64 * 128),
    ),
    # 12 layers of 768 as in GPT-2: qkv, out, scores and values at 512 keys, two MLPs, vocabulary
    "gpt2": (
        {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "ffn_hidden_size": 3072},
        1024, 50257,
        2 * (12 * (4 * 768 * 768 + 2 * 768 * 512 + 2 * 768 * 3072) + 768 * 50257),
    ),
    # Llama-3 8B: 8 key/value heads of 128, three MLP matrices of 14336, 8192 tokens
    "llama3": (
        {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8,
         "ffn_hidden_size": 14336, "gated_linear_unit": True},
        8192, 128256,
        2 * (32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096 * 4096 + 3 * 4096 * 14336)
             + 4096 * 128256),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_hand_counts(name):
    options, length, vocabulary, forward = COUNTS[name]
    assert flops_per_token(config(**options), length, vocabulary) == 3 * forward


def test_the_published_example():
    """L4 h64 heads 4 kv 2 ffn 256 seq 64 vocab 128, batch 8: with the causal half."""
    assert 8 * 64 * flops_per_token(config(num_query_groups=2), 64, 128) == 629_145_600


def test_width_of_the_mlp_and_its_gate():
    narrow, wide = (flops_per_token(config(ffn_hidden_size=n), 64, 128) for n in (256, 512))
    gated = flops_per_token(config(gated_linear_unit=True), 64, 128)
    assert wide - narrow == 6 * 4 * 2 * 64 * 256
    assert gated - narrow == 6 * 4 * 64 * 256


def test_a_window_counts_what_it_sees():
    length, window = 256, 16
    seen = sum(min(i - 0.5, window) for i in range(1, length + 1)) / length  # half the diagonal
    whole = flops_per_token(config(), length, 128)
    windowed = flops_per_token(config(sliding_window=window), length, 128)
    assert whole - windowed == pytest.approx(6 * 4 * 2 * 64 * (length / 2 - seen), rel=1e-12)
    half = flops_per_token(config(sliding_window=window, sliding_window_first_layer=2), length, 128)
    assert whole - half == pytest.approx((whole - windowed) / 2, rel=1e-12)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_query_groups": 2}, {"gated_linear_unit": True, "num_query_groups": 1}],
    ids=["gelu", "grouped", "swiglu"],
)
def test_torch_counts_the_same(options):
    """Matrix products, forward and backward, of the model itself; attention is left out of both."""
    length, vocabulary, batch = 32, 96, 3
    described = config(hidden_dropout=0.0, attention_dropout=0.0, **options)
    model = GPTModel(
        described,
        vocab_size=vocabulary,
        max_sequence_length=length,
        make_vocab_size_divisible_by=1,
    )
    tokens = torch.zeros((batch, length), dtype=torch.int64)
    positions = torch.arange(length).expand(batch, length)
    with FlopCounterMode(display=False) as counter:
        model(tokens, positions, None, labels=tokens).sum().backward()
    products = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    counted = sum(n for op, n in products.items() if "attention" not in op)
    attention = 6 * described.num_layers * 2 * 64 * length / 2
    expected = batch * length * (flops_per_token(described, length, vocabulary) - attention)
    assert counted == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756.0, 51.0),
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA B200", 2250.0, 75.0),
    ],
)
def test_peaks(name, half, single):
    assert known_peak(name, torch.bfloat16) == half * 1e12
    assert known_peak(name, torch.float16) == half * 1e12
    assert known_peak(name, torch.float32) == single * 1e12
    assert known_peak(name, torch.float64) is None


def test_an_unknown_gpu_has_no_peak():
    assert known_peak("Some GPU", torch.bfloat16) is None


def test_the_peak_of_a_processor_is_measured():
    ticks = iter([0.0, 4.0, 10.0, 12.0, 20.0, 23.0, 30.0, 34.0])  # the best takes 2 seconds
    assert measured_peak(torch.float32, lambda: next(ticks)) == 2.0 * 512**3 / 2.0
