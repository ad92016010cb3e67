"""RMSNorm against the modules of transformers, written out in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.row_kernels import rms_norm

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 5, 8, 31, 64, 127, 1000, 2048, 5633, 20001]


def normalized(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * normalized(x, eps).to(x.dtype)


def gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (normalized(x, eps) * (1.0 + weight.float())).type_as(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_bits_of_transformers(size: int, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(5, size) * 3).to(dtype), torch.randn(size).to(dtype)
    assert torch.equal(rms_norm(x, weight, 1e-6), llama(x, weight, 1e-6))
    gemmas = rms_norm(x, weight, 1e-6, offset=1.0, round_first=False)
    assert torch.equal(gemmas, gemma(x, weight, 1e-6))


def test_float32_weight_of_a_bfloat16_model() -> None:
    x, weight = torch.randn(3, 65).bfloat16(), torch.randn(65)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == torch.float32
    assert torch.equal(out, llama(x, weight, 1e-5))
    out = rms_norm(x, weight, 1e-5, round_first=False)  # gpt-oss
    assert torch.equal(out, (weight * normalized(x, 1e-5)).to(x.dtype))


def test_strided_rows_and_any_batch_and_threads() -> None:
    wide, weight = torch.randn(300, 80), torch.randn(64)
    x = wide[:, 3:67]
    out = rms_norm(x, weight, 1e-6)
    assert torch.equal(out, llama(x, weight, 1e-6))
    assert torch.equal(rms_norm(x[7:8], weight, 1e-6), out[7:8])
    transposed = torch.randn(2, 5, 3, 64).transpose(1, 2)
    assert torch.equal(rms_norm(transposed, weight, 1e-6), llama(transposed, weight, 1e-6))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(rms_norm(x, weight, 1e-6), out)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(dtype: torch.dtype) -> None:
    x = torch.zeros(7, 40, dtype=dtype)
    x[1, 3], x[2, 3], x[3], x[4], x[5] = float("nan"), float("inf"), 6e4, 6e-8, torch.randn(40)
    weight = torch.ones(40, dtype=dtype)
    out = rms_norm(x, weight, 1e-6)
    assert torch.equal(out.nan_to_num(99), llama(x, weight, 1e-6).nan_to_num(99))
    assert rms_norm(x[:0], weight, 1e-6).shape == (0, 40)


def test_refuses_gradients() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match="no_grad"):
        rms_norm(x, torch.ones(8), 1e-6)
    with torch.no_grad():
        rms_norm(x, torch.ones(8), 1e-6)
