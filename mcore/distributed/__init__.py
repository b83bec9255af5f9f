"""Data parallelism: gradient reduction, sharding (ZeRO 0 to 3), finalisation of gradients."""

from mcore.config.distributed import DistributedDataParallelConfig
from mcore.distributed.data_parallel import DataParallelModule, ParamPart
from mcore.distributed.ddp import DistributedDataParallel
from mcore.distributed.finalize_model_grads import finalize_model_grads
from mcore.distributed.fully_sharded import FullyShardedDataParallel
from mcore.distributed.sharding_groups import ShardingGroups, build_sharding_groups
from mcore.distributed.tied_copies import share_tied_parameters

__all__ = [
    "DataParallelModule",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "FullyShardedDataParallel",
    "ParamPart",
    "ShardingGroups",
    "build_sharding_groups",
    "finalize_model_grads",
    "share_tied_parameters",
]
