"""The GPT model."""

from mcore.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from mcore.models.gpt.gpt_model import GPTModel

__all__ = ["GPTModel", "get_gpt_layer_local_spec"]
