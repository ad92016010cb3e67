"""Attention and mask functions, registered with transformers as a pair under one name."""

from .forward import attention_forward, register
from .stock import ATTENTION_NAME

__all__ = ["ATTENTION_NAME", "attention_forward", "register"]

register()  # who has imported this needs no door to it any more: see checkpoints/registration.py
