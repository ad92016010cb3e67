"""Quantize by what calibration data says of the inputs of each layer: see `calibrate`."""

from .streaming import calibrate

__all__ = ["calibrate"]
