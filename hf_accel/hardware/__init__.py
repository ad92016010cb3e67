"""The machine: its cores, caches and memory, its measured speeds, and memory that is given back.

Nothing is measured at import.
"""

from .device import ISA_LEVELS, Hardware, bandwidth_here, detect, float_peak, read_bandwidth, trim
from .file_pages import release

__all__ = [
    "ISA_LEVELS", "Hardware", "bandwidth_here", "detect", "float_peak", "read_bandwidth", "release", "trim",
]  # fmt: skip
