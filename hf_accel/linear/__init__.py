"""Quantized linear layers: storage formats, rounding, and the backends that multiply."""

from .backend import Backend, LinearSpec
from .formats import Int4Weight, Int8Weight, QuantizedWeight
from .layer import QuantLinear
from .methods.rtn import quantize
from .registry import BACKENDS, BackendChoice, choose
from .workers import Workers

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendChoice",
    "Int4Weight",
    "Int8Weight",
    "LinearSpec",
    "QuantLinear",
    "QuantizedWeight",
    "Workers",
    "choose",
    "quantize",
]
