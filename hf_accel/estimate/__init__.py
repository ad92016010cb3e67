"""The cost of a model before it is loaded: bytes, seconds per token and money, from its config alone."""

from .estimate import estimate
from .result import Estimate

__all__ = ["Estimate", "estimate"]
