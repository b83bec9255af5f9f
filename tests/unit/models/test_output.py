"""The output head's loss where logits leave the range of the model's dtype."""

import pytest
import torch

from mcore.models.gpt.output import OutputLayer
from mcore.topology.group import Group
from mcore.topology.param_sharding import even_rows
from mcore.transformer import TransformerConfig


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_past_the_range_of_float16(dtype):
    """150 x 200 x 4 is 120,000; the head is not told to fuse with the loss."""
    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, params_dtype=dtype
    )
    group = Group.single("tp")
    head = OutputLayer(
        config,
        3,
        vocab_size=3,
        skip_weight_param_allocation=False,
        row_cut=even_rows(3, group),
        tp_group=group,
    )
    rows = torch.stack([torch.full((4,), x) for x in (200.0, -200.0, 100.0)])
    head.weight.data.copy_(rows)
    hidden = torch.full((1, 1, 4), 150.0, dtype=dtype, requires_grad=True)
    loss, _ = head(hidden, labels=torch.tensor([[2]]))
    assert loss.item() == pytest.approx(60000.0, rel=1e-2)
    loss.sum().backward()
    assert hidden.grad.flatten().tolist() == pytest.approx([100.0] * 4)
    assert torch.isfinite(head.weight.grad).all()
