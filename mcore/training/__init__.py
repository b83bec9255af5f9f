"""The training program: command line, loop, checkpoints, logs."""

from mcore.training.places import corpus_files
from mcore.training.pretrain import pretrain
from mcore.training.setup import Stage

__all__ = ["Stage", "corpus_files", "pretrain"]
