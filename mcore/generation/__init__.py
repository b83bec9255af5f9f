"""Text from a trained model, in one process or over tensor- and pipeline-parallel ranks."""

from mcore.generation.generate import generate, generate_batch, prompt_problem
from mcore.generation.load import LoadedModel, load_model
from mcore.generation.sampling import Sampling

__all__ = [
    "LoadedModel",
    "Sampling",
    "generate",
    "generate_batch",
    "load_model",
    "prompt_problem",
]
