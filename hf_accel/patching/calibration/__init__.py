"""Quantize by what calibration data says of the inputs of each layer: see `calibrate`."""

from .streaming import Calibrated, calibrate

__all__ = ["Calibrated", "calibrate"]
