"""argmax and top-k against torch, with ties, NaN and infinities."""

from __future__ import annotations

import pytest
import torch

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.row_kernels import argmax, topk

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 255, 256, 257, 1000, 32003])
def test_argmax_is_torchs(size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(4, size + 3).to(dtype)[:, 1 : size + 1]  # bfloat16 of 32003: many equals
    assert torch.equal(argmax(logits), logits.argmax(-1))
    ties = torch.randint(0, 3, (5, size)).to(dtype)
    assert torch.equal(argmax(ties), ties.argmax(-1))


def test_argmax_of_what_is_not_finite() -> None:
    nan, infinity = float("nan"), float("inf")
    rows = [[1, nan, infinity, nan], [-infinity] * 4, [-0.0, 0.0, -1, 0.0], [-infinity, -3, infinity, infinity]]
    for length in (4, 600):
        logits = torch.full((4, length), -infinity)
        logits[:, -4:] = torch.tensor(rows)
        assert torch.equal(argmax(logits), logits.argmax(-1))
    assert argmax(torch.randn(2, 3, 50)).shape == (2, 3)
    assert argmax(torch.empty(0, 5)).shape == (0,)
    with pytest.raises(UnsupportedError):
        argmax(torch.empty(2, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "k"), [(1, 1), (9, 9), (300, 1), (300, 299), (5000, 50), (32003, 40)])
def test_topk_is_a_stable_descending_sort(size: int, k: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, size).to(dtype)
    logits[1] = torch.randint(0, 4, (size,)).to(dtype)
    logits[2, size // 2] = float("nan")
    logits[2, size // 3] = -float("inf")
    values, indices = topk(logits, k)
    expected = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    assert torch.equal(indices, expected.indices[:, :k])
    assert torch.equal(values.nan_to_num(99), logits.gather(1, indices).nan_to_num(99))


def test_topk_of_any_batch_and_shape() -> None:
    logits = torch.randn(2, 3, 100)
    values, indices = topk(logits, 5)
    assert torch.equal(values, logits.topk(5).values)
    assert torch.equal(indices, logits.topk(5).indices)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(topk(logits, 5)[1], indices)
    finally:
        torch.set_num_threads(threads)
    assert topk(logits, 0)[0].shape == (2, 3, 0)
    assert topk(logits[:0], 2)[1].shape == (0, 3, 2)
    with pytest.raises(UnsupportedError, match="k=101"):
        topk(logits, 101)
