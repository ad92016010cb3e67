"""Convolutions over inputs in pages in C++, against the same in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.page_conv import page_conv, reference
from hf_accel.kernels.layouts import KV, Ragged

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def places(block_size: int) -> Ragged:
    """Of a new sequence, of one that goes on by a token, and of one whose first blocks are another's too."""
    counts, lengths = [5, 1, 3], [5, 9, 12]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    width = -(-max(lengths) // block_size)
    table = torch.stack([torch.randperm(40)[:width] for _ in counts]).int()
    table[2, 0] = table[1, 0]
    return Ragged(starts, torch.tensor(lengths).int(), max(counts), max(lengths), table)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "length"), [(1, 2), (4, 3), (16, 7)])
@pytest.mark.parametrize("half", [1, 7, 16, 33, 300])
def test_sequences_of_several_lengths(half: int, block_size: int, length: int, dtype: torch.dtype) -> None:
    pages = KV(*(torch.randn(40, 1, block_size, half).to(dtype) for _ in range(2)))
    weight = torch.randn(2 * half, length).to(dtype)
    bias = torch.randn(2 * half).to(dtype) if half % 2 else None
    given, threads = (pages, places(block_size), weight, bias), torch.get_num_threads()
    expected = reference(*given, num_tokens=9)

    def computed(number: int) -> Tensor:
        torch.set_num_threads(number)
        return page_conv(*given, num_tokens=9)

    try:
        assert all(torch.equal(computed(number), expected) for number in (1, 3))
    finally:
        torch.set_num_threads(threads)


def test_gradients_are_refused() -> None:
    pages, weight = KV(torch.randn(40, 1, 4, 2), torch.randn(40, 1, 4, 2)), torch.randn(4, 3, requires_grad=True)
    with pytest.raises(UnsupportedError, match="page_conv"):
        page_conv(pages, places(4), weight, None, num_tokens=9)
