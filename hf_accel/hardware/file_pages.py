"""Pages of tensors that are mapped from files, which can be given back to the system."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

PAGEMAP = "/proc/self/pagemap"  # a word for each page of this process; man 5 proc


# The upper three bits of a word: the page is a file's or shared, it is swapped out, it is in memory.
UNMAPPED, OF_A_FILE = (bytes(range(state << 5, (state + 1) << 5)) for state in (0b000, 0b101))


HIGHEST = 7 if sys.byteorder == "little" else 0  # byte of a word


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
    failed = _madvise()(first * mmap.PAGESIZE, pages * mmap.PAGESIZE, MADV_DONTNEED)
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
    mapped = words[HIGHEST::8].translate(None, UNMAPPED)
    return 0 if mapped.translate(None, OF_A_FILE) else len(mapped)


@lru_cache(maxsize=1)
def _madvise() -> Any:
    """Return the system's function of that name, which takes some time to be found."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
