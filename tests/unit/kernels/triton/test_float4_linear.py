"""MXFP4 weights in our Triton program: of one weight, and of experts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hf_accel.linear.backends.triton import Triton
from tests.devices import triton_device
from tests.unit.linear.test_float4 import made

from .test_quantized_linear import runs


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("row_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products(dtype: torch.dtype, row_invariant: bool) -> None:
    weight, _ = made(70, 96)
    weight = type(weight)(*(t.to(triton_device()) for t in (weight.weight_packed, weight.weight_scale)))
    backend = Triton(row_invariant=row_invariant)
    packed = backend.pack(weight)
    x = torch.randn(5, 96, device=triton_device()).to(dtype)
    out, expected = backend.run(x, packed, None), x.float() @ weight.dequantize(torch.float32).t()
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=1e-5 if dtype is torch.float32 else 2e-3)
    again = backend.unpack(packed)
    assert torch.equal(again.weight_packed, weight.weight_packed)
    assert torch.equal(again.weight_scale, weight.weight_scale)


@runs
@pytest.mark.gpu
def test_experts() -> None:
    parts = [made(64, 64)[0] for _ in range(3)]
    parts = [type(p)(p.weight_packed.to(triton_device()), p.weight_scale.to(triton_device())) for p in parts]
    backend = Triton(row_invariant=True)
    starts = torch.tensor([0, 2, 2, 7], device=triton_device())
    x = torch.randn(7, 64, device=triton_device())
    call = backend.experts([backend.pack(part) for part in parts])
    out = call.run(x, starts, None)
    for expert, (first, last) in enumerate(((0, 2), (2, 2), (2, 7))):
        dense = parts[expert].dequantize(torch.float32)
        torch.testing.assert_close(out[first:last], x[first:last] @ dense.t(), rtol=1e-4, atol=1e-5)
