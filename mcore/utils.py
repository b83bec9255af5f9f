"""Helpers under the path where Megatron's users look for them."""

from mcore.tensor_parallel.initialization import init_method_normal, scaled_init_method_normal
from mcore.tensor_parallel.utils import divide, ensure_divisibility, split_tensor_along_last_dim

__all__ = [
    "divide",
    "ensure_divisibility",
    "init_method_normal",
    "scaled_init_method_normal",
    "split_tensor_along_last_dim",
]
