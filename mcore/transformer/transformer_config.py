"""Megatron's path of `TransformerConfig`."""

from mcore.config.transformer import TransformerConfig

__all__ = ["TransformerConfig"]
