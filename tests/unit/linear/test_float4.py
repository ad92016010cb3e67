"""Weights of 4-bit floats: their numbers by the definition, and products by every backend that takes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_accel.config import Layout
from hf_accel.errors import UnsupportedError
from hf_accel.linear import BACKENDS, LinearSpec
from hf_accel.linear.backends.reference import REFERENCES
from hf_accel.linear.formats import MXFP4, NVFP4, Float4Weight, Mxfp4Weight, Nvfp4Weight, state
from hf_accel.linear.methods.rtn import quantize_like

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LAYOUTS = {"mxfp4": MXFP4, "nvfp4": NVFP4}
TAKEN = [
    (kind, backend)
    for kind in LAYOUTS
    for backend in BACKENDS
    if kind in backend.layouts and backend.is_for("cpu") and "by row" not in backend.name
]
IDS = [f"{kind}-{backend.name}-{backend.activations}" for kind, backend in TAKEN]


def made(kind: str, outputs: int, inputs: int, *, extreme: bool = False) -> tuple[Float4Weight, np.ndarray]:
    """A weight, and its numbers in float64 by E2M1 and the scales of its format."""
    packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    codes = np.stack((packed.numpy() & 15, packed.numpy() >> 4), axis=-1).reshape(outputs, inputs)
    numbers = np.where(codes & 8, -1.0, 1.0) * NUMBERS[codes & 7]
    if kind == "mxfp4":
        scales = torch.randint(*((0, 254) if extreme else (116, 124)), (outputs, inputs // 32), dtype=torch.uint8)
        return Mxfp4Weight(packed, scales), numbers * np.repeat(
            2.0 ** (scales.numpy().astype(float) - 127), 32, axis=1
        )
    stored = torch.randint(*((0, 0x7F) if extreme else (0x58, 0x70)), (outputs, inputs // 16), dtype=torch.uint8)
    whole = torch.tensor([1234.5])
    e4m3 = np.array([(m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)])
    scales_of_groups = (e4m3[stored.numpy()].astype(np.float32) / np.float32(1234.5)).astype(float)
    weight = Nvfp4Weight(packed, stored.view(torch.float8_e4m3fn), whole)
    return weight, numbers * np.repeat(scales_of_groups, 16, axis=1)


def same(one: Float4Weight, other: Float4Weight) -> bool:
    ours, theirs = state(one), state(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)) for name, tensor in ours.items()
    )


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_numbers_are_exact(kind: str) -> None:
    weight, numbers = made(kind, 70, 96, extreme=True)
    assert torch.equal(weight.dequantize(torch.float64), torch.from_numpy(numbers))
    assert torch.equal(weight.dequantize(torch.float64, outputs=slice(3, 9)), torch.from_numpy(numbers[3:9]))
    assert weight.layout == LAYOUTS[kind] and weight.shape == (70, 96)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_parts_are_joined_again(kind: str) -> None:
    weight, _ = made(kind, 12, 64)
    assert same(type(weight).joined([weight.part(slice(i, i + 4)) for i in (0, 4, 8)]), weight)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_bytes(kind: str) -> None:
    layout = LAYOUTS[kind]
    spec = LinearSpec(in_features=64, out_features=10, layout=layout, dtype=torch.bfloat16)
    assert spec.weight_bytes == 10 * (64 // 2 + 64 // {"mxfp4": 32, "nvfp4": 16}[kind])
    assert Layout(**layout.settings | {"scale_dtype": layout.scale_dtype}) == layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 50])
@pytest.mark.parametrize(("kind", "backend"), TAKEN, ids=IDS)
def test_products(kind: str, backend, rows: int, dtype: torch.dtype) -> None:
    spec = LinearSpec(in_features=160, out_features=100, layout=LAYOUTS[kind], dtype=dtype)
    if reason := backend.refuses(spec):
        pytest.skip(reason)
    weight, numbers = made(kind, 100, 160)
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


@pytest.mark.parametrize(("kind", "backend"), TAKEN, ids=IDS)
def test_the_largest_products_fit_the_sums_of_every_number_of_rows(kind: str, backend) -> None:
    weight, _ = made(kind, 64, 160)
    packed = backend.pack(replace(weight, weight_packed=torch.full_like(weight.weight_packed, 0x77)))
    one = backend.run(torch.ones(1, 160), packed, None)
    one = backend.run(torch.ones(1, 160), packed, None)
    for rows in (4, 8, 9):
        out = backend.run(torch.ones(rows, 160), packed, None)
        torch.testing.assert_close(out, one.expand(rows, -1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_is_rounded_is_near(kind: str) -> None:
    weight, _ = made(kind, 20, 64)
    values = torch.randn(20, 64) * 0.1
    rounded = quantize_like(values, weight)
    change = (rounded.dequantize(torch.float32) - values).unflatten(1, (-1, weight.group_size)).abs()
    largest = values.unflatten(1, (-1, weight.group_size)).abs().amax(-1, keepdim=True)
    assert rounded.layout == weight.layout and (change <= largest / 3).all()
    assert change.norm() < 0.15 * values.norm()
    again = quantize_like(torch.zeros(20, 64), weight)
    assert not again.dequantize(torch.float32).any() and again.not_a_number() is None
    with pytest.raises(UnsupportedError, match="NaN"):
        quantize_like(values / 0, weight)


@pytest.mark.parametrize(("kind", "backend"), TAKEN, ids=IDS)
def test_unpack_returns_what_was_packed(kind: str, backend) -> None:
    weight, _ = made(kind, 33, 64, extreme=True)
    assert same(backend.unpack(backend.pack(weight)), weight)
