"""Quantize by what calibration data says of the inputs of each layer: see `calibrate`."""

from .planned import planned
from .streaming import calibrate

__all__ = ["calibrate", "planned"]
