"""The machine: its cores, caches and memory, its measured speeds, and memory that is given back.

Nothing is measured at import.
"""

from .device import Hardware, bandwidth_here, detect, float_peak, read_bandwidth, trim
from .file_pages import release
from .isa_levels import ISA_LEVELS, UNLIMITED, possible_levels

__all__ = [
    "ISA_LEVELS", "UNLIMITED", "Hardware", "bandwidth_here", "detect", "float_peak", "possible_levels",
    "read_bandwidth", "release", "trim",
]  # fmt: skip
