"""Data parallelism: flat gradient buffers, overlapped reduction, finalisation of gradients."""

from mcore.config.distributed import DistributedDataParallelConfig
from mcore.distributed.ddp import DistributedDataParallel
from mcore.distributed.finalize_model_grads import finalize_model_grads

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "finalize_model_grads",
]
