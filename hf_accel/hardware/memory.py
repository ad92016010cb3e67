"""Pages of memory: large ones, and those that are given back to the system.

With large pages the address cache (TLB) of a CPU misses every 2 MB that are read, not every 4 KB; in a virtual machine
a miss costs two walks through tables.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
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


PAGEMAP = "/proc/self/pagemap"  # a word for each page of this process; man 5 proc
STATE = 61  # the lowest of three bits: the page is a file's or shared, it is swapped out, it is in memory
UNMAPPED, OF_A_FILE = 0b000, 0b101
MADV_DONTNEED = 4


def release(tensor: Tensor) -> int:
    """Give back the pages of a tensor that is mapped from a file, as from_pretrained maps weights.

    The tensor keeps its numbers: the system maps the pages again when they are read, from its cache or from the file.
    A tensor with a page that was written to, which is therefore the process's own, stays unchanged. Call it while
    nobody writes to the tensor. Returns the number of bytes: 0 for other memory, and where no /proc says what is
    mapped.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return 0
    # Pages at the edges are shared with the neighbours in the file.
    first = -(-tensor.data_ptr() // mmap.PAGESIZE)
    pages = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE - first
    mapped = _pages_of_a_file(first, pages) if pages > 0 else 0
    if not mapped:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    failed = madvise(first * mmap.PAGESIZE, pages * mmap.PAGESIZE, MADV_DONTNEED)
    return 0 if failed else mapped * mmap.PAGESIZE


def _pages_of_a_file(first: int, pages: int) -> int:
    """Return how many of `pages` pages are in memory; 0 unless all of these belong to a file, or are shared."""
    words = bytearray(8 * pages)
    try:
        with open(PAGEMAP, "rb", buffering=0) as pagemap:
            pagemap.seek(8 * first)
            if pagemap.readinto(words) != len(words):
                return 0
    except OSError:
        return 0
    states = torch.frombuffer(words, dtype=torch.int64) >> STATE & 0b111
    mapped = states != UNMAPPED
    return int(mapped.sum()) if bool((states[mapped] == OF_A_FILE).all()) else 0


def trim() -> None:
    """Give back the freed memory that malloc keeps in all threads' arenas; with glibc only."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(0)
