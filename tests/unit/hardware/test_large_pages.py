"""Memory that is asked for in large pages: what the kernel was told stands in /proc/self/smaps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from hf_accel.hardware.large_pages import LARGE, in_large_pages

from .smaps import SMAPS

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux") or not SMAPS.exists(), reason="no /proc here")


def is_advised(address: int) -> bool:
    """Whether the mapping of an address has the flag hg, MADV_HUGEPAGE."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(bound, 16) for bound in first.split("-"))
            inside = start <= address < end
        elif first == "VmFlags:" and inside:
            return "hg" in rest
    raise AssertionError(f"{address:x} is not mapped")


def test_large_pages_begin_where_the_memory_does() -> None:
    size = 3 * LARGE + 5000
    memory = in_large_pages(size)
    assert (memory.dtype, tuple(memory.shape), memory.untyped_storage().nbytes()) == (torch.uint8, (size,), size)
    assert memory.data_ptr() % LARGE == 0
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no large pages")
    assert is_advised(memory.data_ptr()) and is_advised(memory.data_ptr() + 3 * LARGE - 1)
    assert not is_advised(memory.data_ptr() + 3 * LARGE), "the rest would waste most of a page"
    assert torch.equal(memory.fill_(3)[:: LARGE // 2], torch.full((7,), 3, dtype=torch.uint8))


def test_memory_lives_as_long_as_what_looks_at_it() -> None:
    part = in_large_pages(2 * LARGE).fill_(7).view(torch.int32)[-4:]
    others = [in_large_pages(2 * LARGE).fill_(0) for _ in range(4)]
    assert part.tolist() == 4 * [0x07070707] and len(others) == 4


@pytest.mark.parametrize("size", [0, 1, LARGE - 1])
def test_less_than_a_large_page(size: int) -> None:
    assert in_large_pages(size).numel() == size
