"""The training program: command line, loop, checkpoints, logs."""

from mcore.training.pretrain import pretrain
from mcore.training.setup import Stage

__all__ = ["Stage", "pretrain"]
