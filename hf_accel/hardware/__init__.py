"""The machine: its cores, caches and memory, its measured speeds, and memory that is given back.

Nothing is measured at import.
"""

from .device import Hardware, detect
from .memory import release, trim
from .processor import ISA_LEVELS
from .speed import float_peak, read_bandwidth

__all__ = ["ISA_LEVELS", "Hardware", "detect", "float_peak", "read_bandwidth", "release", "trim"]
