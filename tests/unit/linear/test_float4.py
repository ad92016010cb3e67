"""MXFP4 weights: their numbers by the definition, and products by every backend that takes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_accel.config import Layout
from hf_accel.linear import BACKENDS, LinearSpec
from hf_accel.linear.backends.reference import REFERENCES
from hf_accel.linear.formats import MXFP4, Mxfp4Weight

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TAKEN = [backend for backend in BACKENDS if "mxfp4" in backend.layouts and backend.is_for("cpu")]


def made(outputs: int, inputs: int, exponents: tuple[int, int] = (116, 124)) -> tuple[Mxfp4Weight, np.ndarray]:
    """A weight, and its numbers in float64 by E2M1 and E8M0."""
    packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.randint(*exponents, (outputs, inputs // 32), dtype=torch.uint8)
    codes = np.stack((packed.numpy() & 15, packed.numpy() >> 4), axis=-1).reshape(outputs, inputs)
    numbers = np.where(codes & 8, -1.0, 1.0) * NUMBERS[codes & 7]
    return Mxfp4Weight(packed, scales), numbers * np.repeat(2.0 ** (scales.numpy().astype(float) - 127), 32, axis=1)


def test_the_numbers_are_exact() -> None:
    weight, numbers = made(70, 96, (0, 254))
    assert torch.equal(weight.dequantize(torch.float64), torch.from_numpy(numbers))
    assert torch.equal(weight.dequantize(torch.float64, outputs=slice(3, 9)), torch.from_numpy(numbers[3:9]))
    assert weight.layout == MXFP4 and weight.shape == (70, 96)


def test_parts_are_joined_again() -> None:
    weight, _ = made(12, 64)
    again = Mxfp4Weight.joined([weight.part(slice(i, i + 4)) for i in (0, 4, 8)])
    assert torch.equal(again.weight_packed, weight.weight_packed)
    assert torch.equal(again.weight_scale, weight.weight_scale)


def test_bytes() -> None:
    spec = LinearSpec(in_features=64, out_features=10, layout=MXFP4, dtype=torch.bfloat16)
    assert spec.weight_bytes == 10 * (64 // 2 + 64 // 32)
    assert Layout(**MXFP4.settings | {"scale_dtype": torch.uint8}) == MXFP4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 50])
@pytest.mark.parametrize("backend", TAKEN, ids=lambda b: f"{b.name}-{b.activations}")
def test_products(backend, rows: int, dtype: torch.dtype) -> None:
    spec = LinearSpec(in_features=160, out_features=100, layout=MXFP4, dtype=dtype)
    if reason := backend.refuses(spec):
        pytest.skip(reason)
    weight, numbers = made(100, 160)
    packed = backend.pack(weight)
    x, bias = torch.randn(rows, 160).to(dtype), torch.randn(100).to(dtype)
    out = backend.run(x, packed, bias)
    reference = REFERENCES[backend.activations].run(x.float(), weight, bias.float())
    torch.testing.assert_close(out.float(), reference, rtol=2**-6, atol=1e-3 if dtype is torch.float32 else 2e-2)
    exact = x.double().numpy() @ numbers.T + bias.double().numpy()
    tolerance = 0.02 if backend.activations else 0.006
    assert np.linalg.norm(out.double().numpy() - exact) < tolerance * np.linalg.norm(exact)
    for row in range(rows if backend.row_invariant else 0):
        assert torch.equal(backend.run(x[row : row + 1], packed, bias), out[row : row + 1])


@pytest.mark.parametrize("backend", TAKEN, ids=lambda b: f"{b.name}-{b.activations}")
def test_unpack_returns_what_was_packed(backend) -> None:
    weight, _ = made(33, 64, (0, 255))
    again = backend.unpack(backend.pack(weight))
    assert torch.equal(again.weight_packed, weight.weight_packed)
    assert torch.equal(again.weight_scale, weight.weight_scale)
