"""Attention and mask functions, registered with transformers as a pair under one name.

transformers calls the mask function once a forward pass and kind of layer, the attention function once a layer.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from .forward import ATTENTION_NAME, attention_forward, attention_is_ours
from .mask import mask_forward

__all__ = ["ATTENTION_NAME", "attention_is_ours", "register"]


def register() -> None:
    """Make "hf_accel" an attention implementation; harmless when repeated."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, mask_forward)


register()  # who has imported this needs no door to it any more: see checkpoints/registration.py
