from __future__ import annotations

import ctypes
import gc
import mmap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_accel.hardware import file_pages, release, trim

from .smaps import resident_bytes

PAGE = mmap.PAGESIZE
pytestmark = pytest.mark.skipif(not Path(file_pages.PAGEMAP).exists(), reason="this system has no /proc/self/pagemap")


def mapped(folder: Path, *sizes: int) -> tuple[Path, list[Tensor]]:
    """A file with tensors of so many bytes each, mapped as safetensors does it."""
    file = folder / "model.safetensors"
    tensors = {str(i): torch.randint(0, 256, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}
    save_file(tensors, file)
    with safe_open(file, framework="pt") as opened:
        found = [opened.get_tensor(name) for name in tensors]
    assert all(torch.equal(a, b) for a, b in zip(found, tensors.values(), strict=True))  # read: now in memory
    return file, found


def test_pages_of_a_file_are_given_back_and_read_again(tmp_path: Path) -> None:
    file, (tensor,) = mapped(tmp_path, 300 * PAGE)
    numbers, before = tensor.tolist(), resident_bytes(file)
    assert before >= 299 * PAGE
    assert release(tensor) >= 299 * PAGE  # but for what it shares with the header, and the rest of the last page
    assert resident_bytes(file) <= 2 * PAGE
    assert release(tensor) == 0
    assert tensor.tolist() == numbers


def test_neighbours_stay(tmp_path: Path) -> None:
    sizes = 100 * PAGE + 8, 100 * PAGE + 16, 100 * PAGE + 24
    file, (first, middle, last) = mapped(tmp_path, *sizes)
    before = resident_bytes(file)
    freed = release(middle)
    assert 98 * PAGE <= freed <= 100 * PAGE
    assert resident_bytes(file) == before - freed
    assert release(first) >= 98 * PAGE
    assert release(last) >= 98 * PAGE


def test_numbers_that_were_written_are_kept(tmp_path: Path) -> None:
    """A private mapping: the file has the old numbers, and reading it again would bring them back."""
    _, (tensor,) = mapped(tmp_path, 300 * PAGE)
    tensor[150 * PAGE] += 1
    numbers = tensor.tolist()
    assert release(tensor) == 0
    assert tensor.tolist() == numbers


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(100 * PAGE, dtype=torch.uint8),
        torch.ones(0),
        torch.ones(3),
        torch.ones(100, 100, dtype=torch.complex64).t()[1:],
        torch.empty(100 * PAGE, device="meta"),
        torch.ones(100, 100).to_sparse(),
    ],
    ids=["anonymous", "empty", "small", "not contiguous", "meta", "sparse"],
)
def test_other_tensors_are_left_alone(tensor: Tensor) -> None:
    before = None if tensor.is_meta else tensor.to_dense().clone()
    assert release(tensor) == 0
    assert before is None or torch.equal(tensor.to_dense(), before)


def test_parts_that_are_less_than_a_page(tmp_path: Path) -> None:
    file, tensors = mapped(tmp_path, 100, PAGE // 2, 40 * PAGE)
    before = resident_bytes(file)
    assert [release(t) for t in tensors[:2]] == [0, 0]
    assert release(tensors[2].view(40, PAGE)[:, :8]) == 0  # its rows lie apart
    assert resident_bytes(file) == before


def test_shared_memory_keeps_its_numbers() -> None:
    tensor = torch.randint(0, 256, (100 * PAGE,), dtype=torch.uint8).share_memory_()
    numbers = tensor.tolist()
    release(tensor)
    assert tensor.tolist() == numbers


@pytest.mark.parametrize("pagemap", ["missing", "short"])
def test_nothing_is_given_back_where_the_system_does_not_tell(
    pagemap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, (tensor,) = mapped(tmp_path, 300 * PAGE)
    before = resident_bytes(file)
    (tmp_path / "short").write_bytes(b"123")
    monkeypatch.setattr(file_pages, "PAGEMAP", str(tmp_path / pagemap))
    assert release(tensor) == 0
    assert resident_bytes(file) == before


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library has no malloc_trim")
def test_trim_gives_back_what_was_freed() -> None:
    size, count = 64 * 1024, 2000  # small enough for malloc to keep them
    held = [b"1" * size for _ in range(count)]
    for block in range(count - 1):
        if block % 100:  # what stays is in the way of what malloc gives back by itself
            held[block] = b""
    gc.collect()
    before = anonymous_bytes()
    trim()
    assert anonymous_bytes() < before - size * count // 2
    assert len(held[0]) == size
