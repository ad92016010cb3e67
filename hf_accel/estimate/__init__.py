"""What a model costs before it is loaded: bytes, seconds per token and money, from its config alone."""

from .attention_bytes import AttentionBytes
from .estimate import estimate
from .result import Bound, Estimate
from .roofline import TYPICAL_BALANCE

__all__ = ["TYPICAL_BALANCE", "AttentionBytes", "Bound", "Estimate", "estimate"]
