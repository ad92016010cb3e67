"""Tensors mapped from files: their pages, which can be given back, and whether the files stay as they were."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from bisect import bisect
from collections.abc import Iterable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MAPS = "/proc/self/maps"  # a line for each mapping of this process; man 5 proc
PAGEMAP = "/proc/self/pagemap"  # a word for each page of this process


# The upper three bits of a word: the page is a file's or shared, it is swapped out, it is in memory.
UNMAPPED, OF_A_FILE = (bytes(range(state << 5, (state + 1) << 5)) for state in (0b000, 0b101))


HIGHEST = 7 if sys.byteorder == "little" else 0  # byte of a word


MADV_DONTNEED, MADV_HUGEPAGE = 4, 14


class MappedFiles:
    """The files that this process has mapped, and the tensors that stay in them. Without a /proc it knows none."""

    def __init__(self) -> None:
        self._mappings: list[tuple[int, int, str]] = []  # first address, last one, path
        self._used: dict[str, tuple[int, ...]] = {}  # a stamp of each file that something stays in
        self._kept: set[int] = set()  # the addresses of tensors
        try:
            with open(MAPS, encoding="utf-8", errors="surrogateescape") as maps:
                lines = [line.rstrip("\n").split(maxsplit=5) for line in maps]
        except OSError:
            return
        for line in lines:
            if len(line) == 6 and line[5].startswith("/"):
                first, last = (int(end, 16) for end in line[0].split("-"))
                self._mappings.append((first, last, line[5]))

    def keep(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether all tensors lie in files. If so, they are said to stay there, and their files are watched.

        Large pages are asked for: then the system reads a file in such pieces, and kernels read these as fast as
        memory of the process's own. Pages that it holds in small pieces already stay small.
        """
        held = list(tensors)
        found = [self._mapping(tensor) for tensor in held]
        if None in found:
            return False
        for first, last, path in filter(None, found):
            if path not in self._used:
                self._used[path] = _stamp(path)
                _madvise()(first, last - first, MADV_HUGEPAGE)  # a system without them refuses
        self._kept.update(tensor.data_ptr() for tensor in held)
        return True

    def keeps(self, tensor: Tensor) -> bool:
        """Return whether this tensor stays in its file."""
        return tensor.data_ptr() in self._kept

    def written(self) -> str | None:
        """Return a file that was written to since something stays in it. One that was replaced or deleted was not."""
        for path, stamp in self._used.items():
            now = _stamp(path)
            if stamp[:2] == now[:2] and stamp != now:
                return path
        return None

    def _mapping(self, tensor: Tensor) -> tuple[int, int, str] | None:
        first = tensor.data_ptr()
        place = bisect(self._mappings, first, key=lambda mapping: mapping[0]) - 1
        found = self._mappings[place] if place >= 0 else None
        return found if found is not None and first + tensor.nbytes <= found[1] else None


# The files in which loaded weights may stay; None: they are copied into memory.
staying: ContextVar[MappedFiles | None] = ContextVar("staying", default=None)


def _stamp(path: str) -> tuple[int, ...]:
    """Return what tells whether a file is the same one, and then what changes when it is written to; () without it."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


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
