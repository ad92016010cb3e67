"""What the machine is (cores, caches, memory), what it was measured to do, and memory that goes back to it.

Nothing is measured at import.
"""

from .device import Hardware, detect
from .processor import ISA_LEVELS
from .resident import release, trim
from .speed import float_peak, read_bandwidth

__all__ = ["ISA_LEVELS", "Hardware", "detect", "float_peak", "read_bandwidth", "release", "trim"]
