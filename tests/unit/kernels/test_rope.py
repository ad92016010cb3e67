"""Rotary embedding against transformers' formulas, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.rope import rope, rope_

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def tables(batch: int, tokens: int, rotary_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.randn(batch, tokens, rotary_dim) * 10
    return angles.cos().to(dtype), angles.sin().to(dtype)


def expected(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    cos, sin, size = cos.unsqueeze(1), sin.unsqueeze(1), cos.shape[-1]
    turned = rotate_pairs(x[..., :size]) if interleaved else rotate_half(x[..., :size])
    return torch.cat((x[..., :size] * cos + turned * sin, x[..., size:]), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rotary_dim"), [(64, 64), (128, 128), (80, 20), (6, 2), (48, 34)])
def test_bits_of_transformers(size: int, rotary_dim: int, dtype: torch.dtype, interleaved: bool) -> None:
    for batch in (1, 3):  # of the tables: one row of positions may serve all sequences
        cos, sin = tables(batch, 5, rotary_dim, dtype)
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


@pytest.mark.parametrize("interleaved", [False, True])
def test_half_tables(interleaved: bool) -> None:
    cos, sin = tables(1, 3, 8, torch.bfloat16)
    full = [t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin)]
    q, k = torch.randn(1, 2, 3, 24).bfloat16(), torch.randn(1, 1, 3, 24).bfloat16()
    out, _ = rope(q, k, cos, sin, interleaved=interleaved, rotary_dim=16)
    assert torch.equal(out, expected(q, *full, interleaved))


def test_in_place_on_views_of_one_buffer() -> None:
    buffer = torch.randn(600, 6 * 16).bfloat16()
    cos, sin = tables(1, 600, 12, torch.bfloat16)
    q, k = buffer[:, :64].view(600, 4, 16), buffer[:, 64:80].view(600, 1, 16)
    before = buffer.clone()
    by_head = [expected(t.transpose(0, 1)[None], cos, sin, False)[0].transpose(0, 1) for t in (q, k)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        rope_(q, k, cos[0], sin[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(q, by_head[0])
    assert torch.equal(k, by_head[1])
    assert torch.equal(buffer[:, 80:], before[:, 80:])


def test_extremes_and_empty() -> None:
    cos, sin = tables(1, 4, 8, torch.float32)
    q = torch.randn(1, 1, 4, 8)
    q[0, 0, 0, 0], q[0, 0, 1, 1], q[0, 0, 2] = float("nan"), float("inf"), 1e-42
    out, _ = rope(q, q, cos, sin)
    assert torch.equal(out.nan_to_num(9, 8, 7), expected(q, cos, sin, False).nan_to_num(9, 8, 7))
    empty = torch.empty(0, 2, 8)
    assert rope(empty, empty, cos[0, :0], sin[0, :0])[0].shape == (0, 2, 8)
    with pytest.raises(UnsupportedError, match="no_grad"):
        rope(q.requires_grad_(), q, cos, sin)
