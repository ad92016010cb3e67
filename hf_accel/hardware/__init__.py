"""What the machine is (cores, caches, memory) and what it was measured to do. Nothing is measured at import."""

from .device import Hardware, detect
from .processor import ISA_LEVELS
from .speed import float_peak, read_bandwidth

__all__ = ["ISA_LEVELS", "Hardware", "detect", "float_peak", "read_bandwidth"]
