"""Attention that keeps to documents, against one dense mask in float64."""

import pytest
import torch
import torch.nn.functional as F

from mcore.transformer.documents import pack_documents
from mcore.transformer.dot_product_attention import DotProductAttention
from mcore.transformer.dropout import DropoutState


def starts_of(*samples):
    """[b, s] bool from the lengths of each sample's documents."""
    rows = []
    for lengths in samples:
        row = torch.zeros(sum(lengths), dtype=torch.bool)
        row[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
        rows.append(row)
    return torch.stack(rows)


def dense(is_start):
    """True where a query sees a key: written from the definition, token by token."""
    b, s = is_start.shape
    visible = torch.zeros(b, 1, s, s, dtype=torch.bool)
    for sample in range(b):
        for query in range(s):
            for key in range(query, -1, -1):
                visible[sample, 0, query, key] = True
                if is_start[sample, key]:
                    break
    return visible


LENGTHS = [
    [[7, 1, 1, 15, 8], [32]],
    [[1] * 32],
    [[32]],
    [[2, 3, 5, 9, 13], [16, 16], [31, 1]],
]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("groups", [1, 4])
def test_outputs_and_gradients_are_those_of_the_dense_mask(lengths, groups):
    generator = torch.Generator().manual_seed(1)
    is_start = starts_of(*lengths)
    b, s = is_start.shape
    shapes = [(b, 4, s, 6), (b, groups, s, 6), (b, groups, s, 6)]
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    )
    upstream = torch.randn(b, 4, s, 6, generator=generator, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=dense(is_start), enable_gqa=True)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream)
    actual = pack_documents(is_start).attend(q, k, v)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    for got, want in zip(torch.autograd.grad(actual, (q, k, v), upstream), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_hidden_is_the_dense_mask():
    is_start = starts_of([7, 1, 8], [16])
    assert torch.equal(~pack_documents(is_start).hidden(), dense(is_start))


def test_attention_dropout_keeps_to_documents():
    """The values of a hidden document do not matter, with the spelled-out softmax as well."""
    generator = torch.Generator().manual_seed(1)
    attention = DotProductAttention(layer_number=0, first_head=0, dropout=0.5)
    q, k, v = (torch.randn(8, 1, 2, 4, generator=generator) for _ in range(3))
    documents = pack_documents(starts_of([5, 3]))
    state = DropoutState(1, 1, torch.arange(1))
    before = attention(q, k, v, documents, state)
    k[:5], v[:5] = 100.0, -100.0
    after = attention(q, k, v, documents, state)
    assert torch.equal(before[5:], after[5:])
    assert not torch.equal(before[:5], after[:5])


def test_padding_is_bounded():
    """A group holds documents of lengths within a factor of two."""
    documents = pack_documents(starts_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 19]))
    assert sum(rows.numel() for rows in documents.rows) < 2 * 64
    assert len(documents.rows) <= 6
