"""Helpers under the path where Megatron's users look for them."""

from mcore.tensor_parallel.utils import divide, ensure_divisibility, split_tensor_along_last_dim

__all__ = ["divide", "ensure_divisibility", "split_tensor_along_last_dim"]
