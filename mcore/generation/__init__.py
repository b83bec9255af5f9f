"""Text from a trained model, in one process."""

from mcore.generation.generate import generate
from mcore.generation.load import LoadedModel, load_model
from mcore.generation.sampling import Sampling

__all__ = ["LoadedModel", "Sampling", "generate", "load_model"]
