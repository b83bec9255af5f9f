"""What is kept in host memory, with every tensor counting as one of a device."""

import pytest
import torch

from mcore.transformer import TransformerConfig, TransformerLayer, host_activations
from mcore.transformer.host_activations import saved_on_host

SEQUENCE, BATCH, HIDDEN = 5, 2, 8


@pytest.fixture
def moved(monkeypatch):
    """Shapes of what is copied."""
    shapes = []

    def host_copy(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor.detach().clone()

    monkeypatch.setattr(host_activations, "host_copy", host_copy)
    return shapes


def gradients(layer, x, context):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with context:
        output = layer(x)
    output.square().sum().backward()
    return [x.grad, *(param.grad for param in layer.parameters())]


@pytest.mark.parametrize("fused", [False, True])
def test_activations_move_and_weights_stay(moved, fused):
    torch.manual_seed(0)
    layer = TransformerLayer(
        TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            gated_linear_unit=True,
            ffn_hidden_size=12,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=torch.float64,
        ),
        0,
    )
    if fused:  # as in the buffers of the data-parallel wrapper: all weights in one memory
        flat = torch.cat([param.detach().flatten() for param in layer.parameters()])
        sizes = [param.numel() for param in layer.parameters()]
        for param, view in zip(layer.parameters(), flat.split(sizes), strict=True):
            param.data = view.view_as(param)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.float64)
    wanted = gradients(layer, x, saved_on_host([layer]))
    assert moved == []
    got = gradients(layer, x, saved_on_host([layer], lambda _: False))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)  # copies are contiguous
    weights = {tuple(p.shape) for p in layer.parameters() if p.dim() == 2}
    assert not {*moved} & {*weights, *(shape[::-1] for shape in weights)}
    assert (SEQUENCE, BATCH, HIDDEN) in moved
