"""Quantize by what calibration data says of the inputs of each layer: see `calibrate`."""

from .streaming import calibrate, with_folds

__all__ = ["calibrate", "with_folds"]
