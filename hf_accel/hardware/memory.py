"""Memory: how much the host and a GPU have, pages that are given back to the system, and large pages.

With large pages the address cache (TLB) of a CPU misses every 2 MB that are read, not every 4 KB; in a virtual machine
a miss costs two walks through tables.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from .container import ROOT, content_of, memory_limits


def host_memory(root: Path = ROOT) -> tuple[int | None, int | None]:
    """Return total and free bytes, within the container's limit.

    Free memory includes what the page cache would give back.
    """
    fields = dict(line.split(":") for line in (content_of(root / "proc/meminfo") or "").splitlines() if ":" in line)
    if "MemTotal" not in fields:
        return _installed_memory(), None
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, used in memory_limits(root):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def gpu_memory(device: torch.device) -> tuple[int, int]:
    free, total = torch.cuda.mem_get_info(device)
    return total, free


def pool_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU that one large pool can take; None for a host, which commits memory only on use."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch would give it back

    return gpu_memory(device)[1] + unused


def _installed_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return None


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
