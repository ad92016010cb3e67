"""Rotary embedding against transformers' formulas, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.row_kernels import rope

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def tables(batch: int, tokens: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.randn(batch, tokens, size) * 10
    return angles.cos().to(dtype), angles.sin().to(dtype)


def expected(x: Tensor, cos: Tensor, sin: Tensor, interleaved: int) -> Tensor:
    if interleaved == 3:  # as DeepSeek
        x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
        cos, sin = (torch.cat((each[..., : each.shape[-1] // 2],) * 2, -1) for each in (cos, sin))
    if interleaved == 2:  # as GLM
        cos, sin = (each[..., : each.shape[-1] // 2].repeat_interleave(2, dim=-1) for each in (cos, sin))
    turned = rotate_pairs(x) if interleaved in (True, 2) else rotate_half(x)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


@pytest.mark.parametrize("interleaved", [False, True, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 20, 34, 64, 128])
def test_bits_of_transformers(size: int, dtype: torch.dtype, interleaved: int) -> None:
    for batch in (1, 3):  # of the tables: one row of positions may serve all sequences
        cos, sin = tables(batch, 5, size, dtype)
        q = torch.randn(3, 5, 4, size).to(dtype).transpose(1, 2)
        k = torch.randn(3, 5, 2, size).to(dtype).transpose(1, 2)
        both = rope(q, k, cos, sin, interleaved=interleaved)
        assert torch.equal(both[0], expected(q, cos, sin, interleaved))
        assert torch.equal(both[1], expected(k, cos, sin, interleaved))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_once_as_cohere(dtype: torch.dtype) -> None:
    cos, sin = tables(1, 7, 32, dtype)
    q, k = torch.randn(1, 2, 7, 32).to(dtype), torch.randn(1, 1, 7, 32).to(dtype)
    out, _ = rope(q, k, cos, sin, interleaved=True, round_each=False)
    assert torch.equal(out, expected(q.float(), cos.float(), sin.float(), True).to(dtype))
    out, _ = rope(q, k, cos.float(), sin.float())
    assert torch.equal(out, expected(q.float(), cos.float(), sin.float(), False).to(dtype))


def test_views_of_one_buffer_and_threads() -> None:
    buffer = torch.randn(1, 600, 6 * 16).bfloat16()
    cos, sin = tables(1, 600, 16, torch.bfloat16)
    q, k = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in (buffer[..., :64], buffer[..., 64:80]))
    before = buffer.clone()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        out = rope(q, k, cos[0], sin[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(out[0], expected(q, cos, sin, False)) and torch.equal(out[1], expected(k, cos, sin, False))
    assert torch.equal(buffer, before)


def test_extremes_and_empty() -> None:
    cos, sin = tables(1, 4, 8, torch.float32)
    q = torch.randn(1, 1, 4, 8)
    q[0, 0, 0, 0], q[0, 0, 1, 1], q[0, 0, 2] = float("nan"), float("inf"), 1e-42
    out, _ = rope(q, q, cos, sin)
    assert torch.equal(out.nan_to_num(9, 8, 7), expected(q, cos, sin, False).nan_to_num(9, 8, 7))
    empty = torch.empty(1, 2, 0, 8)
    assert rope(empty, empty, cos[:, :0], sin[:, :0])[0].shape == (1, 2, 0, 8)
    with pytest.raises(UnsupportedError, match="no_grad"):
        rope(q.requires_grad_(), q, cos, sin)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("round_each", [True, False])
def test_tables_of_half_a_head(round_each: bool, dtype: torch.dtype) -> None:
    q, k = (torch.randn(2, heads, 5, 24).to(dtype) for heads in (6, 2))
    cos, sin = (torch.randn(2, 5, 12).to(dtype) for _ in range(2))
    whole = [torch.cat((table, table), dim=-1) for table in (cos, sin)]
    expected = rope(q, k, *whole, round_each=round_each)
    found = rope(q, k, cos, sin, interleaved=4, round_each=round_each)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, rope(q, k[:, :0], *whole, round_each=round_each)[:1], expected[:1]))
