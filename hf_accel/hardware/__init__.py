"""The machine: its cores, caches and memory, its measured speeds, and memory that is given back.

Nothing is measured at import.
"""

from .device import ISA_LEVELS, Hardware, detect, float_peak, read_bandwidth, release, trim

__all__ = ["ISA_LEVELS", "Hardware", "detect", "float_peak", "read_bandwidth", "release", "trim"]
