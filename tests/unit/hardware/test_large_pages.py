"""Memory that is asked for in large pages: what the kernel was told stands in /proc/self/smaps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_accel.hardware.device import LARGE, large_pages

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


def middle(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.nbytes // 2


def test_the_whole_large_pages_of_a_tensor_are_asked_for() -> None:
    tensor = torch.empty(64 * LARGE, dtype=torch.uint8)  # more than malloc keeps for later
    assert not is_advised(middle(tensor))
    assert large_pages(tensor) is tensor
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no large pages")
    assert is_advised(middle(tensor))
    assert torch.equal(tensor.fill_(3)[:: LARGE // 2], torch.full((128,), 3, dtype=torch.uint8))


@pytest.mark.parametrize("size", [0, 1, LARGE - 1])
def test_less_than_a_large_page(size: int) -> None:
    assert large_pages(torch.empty(size, dtype=torch.uint8)).numel() == size


def test_other_devices() -> None:
    assert large_pages(torch.empty(4 * LARGE, device="meta")).is_meta
