"""Large pages of memory: the address cache (TLB) of a CPU then misses every 2 MB that are read, not every 4 KB.

In a virtual machine a miss costs two walks through tables.
"""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

LARGE = 2**21  # bytes
MADV_HUGEPAGE = 14


def large_pages(tensor: Tensor) -> Tensor:
    """Ask the system for large pages for a tensor that was not written yet, and return it.

    The system may ignore this: only Linux is asked, for memory of a CPU, of which the whole large pages count.
    """
    first = -(-tensor.data_ptr() // LARGE) * LARGE
    last = (tensor.data_ptr() + tensor.nbytes) // LARGE * LARGE
    if sys.platform == "linux" and tensor.device.type == "cpu" and last > first:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(first, last - first, MADV_HUGEPAGE)
    return tensor
