"""RMSNorm and LayerNorm against the modules of transformers, written out in torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.norm import layer_norm, rms_norm

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 5, 8, 31, 64, 127, 1000, 2048, 5633]


def normalized(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * normalized(x, eps).to(x.dtype)


def gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (normalized(x, eps) * (1.0 + weight.float())).type_as(x)


def cohere(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype, x = x.dtype, x.float()
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return (weight.float() * ((x - mean) * torch.rsqrt(variance + eps))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_bits_of_transformers(size: int, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(5, size) * 3).to(dtype), torch.randn(size).to(dtype)
    assert torch.equal(rms_norm(x, weight, 1e-6)[0], llama(x, weight, 1e-6))
    gemmas, _ = rms_norm(x, weight, 1e-6, offset=1.0, round_first=False)
    assert torch.equal(gemmas, gemma(x, weight, 1e-6))
    assert torch.equal(layer_norm(x, weight, None, 1e-5)[0], cohere(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_added_and_rounded_first(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 3, 100).to(dtype), (torch.randn(2, 3, 100) * 100).to(dtype)
    weight = torch.randn(100).to(dtype)
    out, total = rms_norm(x, weight, 1e-6, residual=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, llama(x + residual, weight, 1e-6))
    out, total = layer_norm(x, weight, None, 1e-6, residual=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, cohere(x + residual, weight, 1e-6))
    _, same = rms_norm(x, weight, 1e-6)
    assert same is x


def test_float32_weight_of_a_bfloat16_model() -> None:
    x, weight = torch.randn(3, 65).bfloat16(), torch.randn(65)
    out, _ = rms_norm(x, weight, 1e-5)
    assert out.dtype == torch.float32
    assert torch.equal(out, llama(x, weight, 1e-5))
    out, _ = rms_norm(x, weight, 1e-5, round_first=False)  # gpt-oss
    assert torch.equal(out, (weight * normalized(x, 1e-5)).to(x.dtype))
    out, _ = rms_norm(x, None, 1e-5)
    assert torch.equal(out, normalized(x, 1e-5).to(x.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_layer_norm_against_float64(size: int, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(n, size).squeeze(0).to(dtype) for n in (4, 1, 1))
    out, _ = layer_norm(x, weight, bias, 1e-5)
    exact = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5)
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=rounding)


def test_strided_rows_and_any_batch_and_threads() -> None:
    wide, weight = torch.randn(300, 80), torch.randn(64)
    x = wide[:, 3:67]
    out, _ = rms_norm(x, weight, 1e-6)
    assert torch.equal(out, llama(x, weight, 1e-6))
    assert torch.equal(rms_norm(x[7:8], weight, 1e-6)[0], out[7:8])
    transposed = torch.randn(2, 5, 3, 64).transpose(1, 2)
    assert torch.equal(rms_norm(transposed, weight, 1e-6)[0], llama(transposed, weight, 1e-6))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(rms_norm(x, weight, 1e-6)[0], out)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(dtype: torch.dtype) -> None:
    x = torch.zeros(7, 40, dtype=dtype)
    x[1, 3], x[2, 3], x[3], x[4], x[5] = float("nan"), float("inf"), 6e4, 6e-8, torch.randn(40)
    weight = torch.ones(40, dtype=dtype)
    out, _ = rms_norm(x, weight, 1e-6)
    assert torch.equal(out.nan_to_num(99), llama(x, weight, 1e-6).nan_to_num(99))
    assert rms_norm(x[:0], weight, 1e-6)[0].shape == (0, 40)


def test_refuses_gradients() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match="no_grad"):
        rms_norm(x, torch.ones(8), 1e-6)
    with torch.no_grad():
        rms_norm(x, torch.ones(8), 1e-6)
