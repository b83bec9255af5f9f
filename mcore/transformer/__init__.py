"""Transformer layers that are cut over tensor-parallel ranks."""

from mcore.config.transformer import TransformerConfig
from mcore.transformer.block import TransformerBlock
from mcore.transformer.dropout import DropoutState
from mcore.transformer.layer import TransformerLayer

__all__ = ["DropoutState", "TransformerBlock", "TransformerConfig", "TransformerLayer"]
