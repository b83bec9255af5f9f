"""Norms and attention in bf16 and fp16 where squares and scores leave fp16's range."""

import math

import pytest
import torch

from mcore.topology.group import Group
from mcore.transformer.documents import pack_documents
from mcore.transformer.dot_product_attention import DotProductAttention
from mcore.transformer.dropout import DropoutState
from mcore.transformer.norm import build_norm
from mcore.transformer.transformer_config import TransformerConfig

#: A few units in the last place.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("residual", ["narrow", "fp32"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_of_values_whose_squares_overflow(kind, residual, dtype):
    config = TransformerConfig(
        num_layers=1, hidden_size=48, num_attention_heads=4, normalization=kind, params_dtype=dtype
    )
    norm = build_norm(config, 48, Group.single("tp"), partial_gradient=False)
    x = (draw(5, 48) * 8000.0).clamp(-60000, 60000)
    x = x.to(dtype if residual == "narrow" else torch.float32).requires_grad_()
    wide = x.detach().double().requires_grad_()
    assert not torch.isfinite(x.detach().to(torch.float16).square().sum(-1)).any()
    centred = wide - (wide.mean(-1, keepdim=True) if kind == "LayerNorm" else 0.0)
    expected = (
        centred * (centred.square().mean(-1, keepdim=True) + config.layernorm_epsilon).rsqrt()
    )
    grad = draw(5, 48, seed=1)
    out = norm(x)
    assert out.dtype == dtype
    out.backward(grad.to(dtype))
    expected.backward(grad)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    # Gradients are about 1e-4: below fp16's normal numbers, so compared by their own size.
    error = (x.grad.double() - wide.grad).abs().max() / wide.grad.abs().max()
    assert error <= 4 * tolerance
    assert torch.isfinite(norm.weight.grad).all()


S, B, N, D = 6, 2, 4, 16


def huge_scores(dtype, groups):
    """Queries and keys whose scaled products pass 60,000 on both sides, and near ones too."""
    sizes = torch.linspace(-1.0, 1.0, S, dtype=torch.float64).view(S, 1, 1, 1)
    query = (170.0 + draw(S, B, N, D)).to(dtype)
    key = (170.0 * sizes + 0.02 * draw(S, B, groups, D, seed=1)).to(dtype)
    value = draw(S, B, groups, D, seed=2).to(dtype)
    return query, key, value


def reference(query, key, value, hidden):
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (query, key, value))
    k, v = (x.repeat_interleave(N // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    assert scores.abs().max() > 60000
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ v).permute(2, 0, 1, 3).flatten(2)


CAUSAL = ~torch.ones(S, S, dtype=torch.bool).tril()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("groups", [N, 2])
@pytest.mark.parametrize("way", ["causal", "mask", "window", "documents", "dropout"])
def test_attention_with_scores_past_the_range_of_fp16(way, groups, dtype):
    attention = DotProductAttention(0, 0, 1e-12 if way == "dropout" else 0.0, None)
    hidden, mask, state = CAUSAL, None, None
    if way == "mask":
        hidden = mask = CAUSAL | torch.eye(S, dtype=torch.bool).roll(2, 0).tril(-1)
    elif way == "window":
        attention.window = 3
        hidden = CAUSAL | torch.ones(S, S, dtype=torch.bool).tril(-3)
    elif way == "documents":
        documents = torch.tensor([0, 0, 1, 1, 1, 1])
        hidden = CAUSAL | (documents[:, None] != documents[None])
        mask = pack_documents(torch.tensor([[True, False, True, False, False, False]] * B))
    elif way == "dropout":
        state = DropoutState(1, 1, torch.arange(B))
    query, key, value = (x.requires_grad_() for x in huge_scores(dtype, groups))
    out = attention(query, key, value, mask, state)
    expected = reference(*(x.detach() for x in (query, key, value)), hidden)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    out.backward(torch.ones_like(out))
    assert all(torch.isfinite(x.grad).all() for x in (query, key, value))
