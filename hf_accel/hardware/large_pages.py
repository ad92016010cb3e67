"""Memory in large pages, in which weights are read faster."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import torch
from torch import Tensor

LARGE = 2**21  # bytes


def in_large_pages(size: int) -> Tensor:
    """Return memory that nobody has written, uint8 [size], whose large pages are asked of the system.

    With large pages the address cache (TLB) of a CPU misses every 2 MB that are read, not every 4 KB; in a virtual
    machine a miss costs two walks through tables. And the system clears memory at once, not at each 4 KB that are
    first written. A large page begins at a multiple of its size, where malloc begins nothing: such memory is mapped
    here. What is left at the end lies in small pages, so that no memory is wasted.

    The system may ignore this: only Linux is asked.
    """
    if not sys.platform.startswith("linux") or size < LARGE:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    mapped = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % LARGE
    with contextlib.suppress(OSError):  # of a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE, first, size // LARGE * LARGE)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=first)
