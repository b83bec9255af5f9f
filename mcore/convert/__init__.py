"""Models of other programs in and out."""

from mcore.convert.huggingface import hf_to_state, state_to_hf
from mcore.convert.model_options import ModelOptions
from mcore.convert.model_state import ModelTensors, load_model_state, save_model_state

__all__ = [
    "ModelOptions",
    "ModelTensors",
    "hf_to_state",
    "load_model_state",
    "save_model_state",
    "state_to_hf",
]
