"""Transformer layers that are cut over tensor-parallel ranks."""

from mcore.config.transformer import TransformerConfig
from mcore.transformer.block import TransformerBlock
from mcore.transformer.documents import AttentionMask, PackedDocuments, pack_documents
from mcore.transformer.dropout import DropoutState
from mcore.transformer.layer import TransformerLayer

__all__ = [
    "AttentionMask",
    "DropoutState",
    "PackedDocuments",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerLayer",
    "pack_documents",
]
