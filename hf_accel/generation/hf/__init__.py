"""The generation methods of a patched transformers model."""

from .engine import Engine
from .generation_state import GenerationState
from .mixin import AcceleratedGeneration
from .model_runner import prepare_step, weights_salt

__all__ = [
    "AcceleratedGeneration",
    "Engine",
    "GenerationState",
    "prepare_step",
    "weights_salt",
]
