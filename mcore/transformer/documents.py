"""Several documents in one sequence: attention that never looks across their borders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore.device import send


@dataclass(frozen=True, slots=True)
class PackedDocuments:
    """Where the documents of a micro batch lie; what `--reset-attention-mask` gives to attention.

    Attention runs document by document, as causal attention over a few padded batches of documents
    of similar length, so that no [s, s] mask exists and short documents cost little. Made on the
    host by `pack_documents`, so that nothing waits for the device; every rank makes its own from
    the tokens that it reads.

    Attributes:
        document: [b, s] int64, number of the document of each token.
        rows: for each group of documents, [documents, longest] int64: the flat (sample-major) token
            numbers of each, padded by its last token.
        chosen: for each token in flat order, the place of its result in all groups laid end to end,
            [b * s] int64.
    """

    document: Tensor
    rows: tuple[Tensor, ...]
    chosen: Tensor

    def to(self, device: torch.device) -> PackedDocuments:
        """The same on a device."""
        return replace(
            self,
            document=send(self.document, device),
            rows=tuple(send(rows, device) for rows in self.rows),
            chosen=send(self.chosen, device),
        )

    def hidden(self) -> Tensor:
        """[b, 1, s, s] bool, True where a query must not see a key; for spelled-out attention."""
        other = self.document[:, :, None] != self.document[:, None, :]
        length = self.document.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=other.device).triu(1)
        return (other | future)[:, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention inside each document.

        Args:
            query: [b, n, s, d].
            key: [b, g, s, d], g a divisor of n.
            value: [b, g, s, d].

        Returns:
            [b, n, s, d].
        """
        b, n, s, d = query.shape
        grouped = key.shape[1] != n
        # [b, n, s, d] -> [b * s, n, d]
        flat = [x.transpose(1, 2).reshape(b * s, x.shape[1], d) for x in (query, key, value)]
        results = []
        for rows in self.rows:
            # [documents, longest, n, d] -> [documents, n, longest, d]
            q, k, v = (x[rows].transpose(1, 2) for x in flat)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            results.append(out.transpose(1, 2).reshape(-1, n, d))
        attended = torch.cat(results)[self.chosen]
        return attended.view(b, s, n, d).transpose(1, 2)


#: True = hidden, broadcast to [b, n, s, s]; or documents; None = causal.
AttentionMask: TypeAlias = Tensor | PackedDocuments | None


def pack_documents(is_document_start: Tensor) -> PackedDocuments:
    """Group the documents of a micro batch by length.

    Args:
        is_document_start: [b, s] bool on the host, True at the first token of a document; the first
            token of a sample always is one.
    """
    b, s = is_document_start.shape
    starts_at = is_document_start.clone()
    starts_at[:, 0] = True
    flat = starts_at.flatten()
    starts = flat.nonzero().flatten()
    lengths = torch.diff(starts, append=torch.tensor([b * s]))
    # Lengths of one group differ by less than a factor of two: (2^(i-1), 2^i].
    size_class = (lengths * 2 - 1).double().log2().floor().long()
    rows, order = [], torch.empty(b * s, dtype=torch.int64)
    placed = 0
    for kind in size_class.unique().tolist():
        members = (size_class == kind).nonzero().flatten()
        longest = int(lengths[members].max())
        offsets = torch.arange(longest)
        tokens = starts[members, None] + torch.minimum(offsets, lengths[members, None] - 1)
        rows.append(tokens)
        # A padded place repeats the last token; its true place is the first of them.
        real = offsets < lengths[members, None]
        places = placed + torch.arange(tokens.numel()).view_as(tokens)
        order[tokens[real]] = places[real]
        placed += tokens.numel()
    document = (flat.long().cumsum(0) - 1).view(b, s)
    return PackedDocuments(document, tuple(rows), order)
