"""DeepSpeed's JSON configuration, read as options of mcore."""

from mcore.deepspeed.batch import BatchSizes, solve_batch
from mcore.deepspeed.reader import read_config
from mcore.deepspeed.resolved import resolved_config
from mcore.deepspeed.translate import Setting, Translation, translate

__all__ = [
    "BatchSizes",
    "Setting",
    "Translation",
    "read_config",
    "resolved_config",
    "solve_batch",
    "translate",
]
