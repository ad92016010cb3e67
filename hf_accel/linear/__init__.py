"""Quantized linear layers: storage formats, rounding, and the backends that multiply."""

from ..hardware.workers import Workers
from .backends.backend import Backend, LinearSpec
from .backends.registry import BACKENDS, BackendChoice, choose
from .experts import ExpertWeights, QuantExperts
from .formats import Float8Weight, Int4Weight, Int8Weight, QuantizedWeight
from .layer import QuantLinear, QuantModule
from .methods.rtn import quantize
from .replacement import Replacement

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendChoice",
    "ExpertWeights",
    "Float8Weight",
    "Int4Weight",
    "Int8Weight",
    "LinearSpec",
    "QuantExperts",
    "QuantLinear",
    "QuantModule",
    "QuantizedWeight",
    "Replacement",
    "Workers",
    "choose",
    "quantize",
]
