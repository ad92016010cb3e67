"""Weights of 4-bit floats in our Triton program: of one weight, and of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from hf_accel.kernels.triton.quantized_linear import launches, stacked
from hf_accel.linear import LinearSpec
from hf_accel.linear.backends.tiles import for_experts, tiles_of
from hf_accel.linear.backends.triton import Triton
from hf_accel.linear.formats import NVFP4, Float4Weight, from_state, state, zeros
from tests.devices import triton_device
from tests.unit.linear.test_float4 import LAYOUTS, made, same

from .processes import compiled
from .test_quantized_linear import runs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUICK = ("nvfp4", torch.bfloat16, 80)
CASES = [(kind, dtype, capability) for kind in LAYOUTS for dtype in DTYPES for capability in (80, 89, 90)]


def there(kind: str, outputs: int, inputs: int) -> Float4Weight:
    weight, _ = made(kind, outputs, inputs)
    return from_state(type(weight), {name: tensor.to(triton_device()) for name, tensor in state(weight).items()})


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("row_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_products(kind: str, dtype: torch.dtype, row_invariant: bool) -> None:
    weight, backend = there(kind, 70, 96), Triton(row_invariant=row_invariant)
    packed = backend.pack(weight)
    x, bias = torch.randn(5, 96, device=triton_device()).to(dtype), torch.randn(70, device=triton_device()).to(dtype)
    out = backend.run(x, packed, bias)
    expected = x.float() @ weight.dequantize(torch.float32).t() + bias.float()
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=1e-5 if dtype is torch.float32 else 2e-3)
    assert same(backend.unpack(packed), weight)


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_inputs_in_parts(kind: str) -> None:
    """Enough inputs for programs to share them, and few outputs."""
    weight, backend = there(kind, 16, 4096), Triton(row_invariant=False)
    x = torch.randn(1, 4096, device=triton_device())
    expected = x @ weight.dequantize(torch.float32).t()
    torch.testing.assert_close(backend.run(x, backend.pack(weight), None), expected, rtol=1e-4, atol=1e-4)


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYOUTS)
def test_experts(kind: str) -> None:
    parts = [there(kind, 64, 64) for _ in range(3)]
    parts = [
        part if part.divisor is None else part.changed(weight_global_scale=part.divisor * (i + 1))
        for i, part in enumerate(parts)
    ]
    backend = Triton(row_invariant=True)
    starts = torch.tensor([0, 2, 2, 7], device=triton_device())
    x = torch.randn(7, 64, device=triton_device())
    call = backend.experts([backend.pack(part) for part in parts])
    out = call.run(x, starts, None)
    for expert, (first, last) in enumerate(((0, 2), (2, 2), (2, 7))):
        dense = parts[expert].dequantize(torch.float32)
        torch.testing.assert_close(out[first:last], x[first:last] @ dense.t(), rtol=1e-4, atol=1e-5)
    assert all(same(backend.unpack(part), parts[i]) for i, part in enumerate(call.parts))


@compiled
@pytest.mark.parametrize(
    ("kind", "dtype", "capability"),
    [pytest.param(*case, marks=[] if case == QUICK else [pytest.mark.long]) for case in CASES],
    ids=str,
)
def test_every_tile_fits_every_gpu(kind: str, dtype: torch.dtype, capability: int) -> None:
    from tests.unit.kernels.triton.compiling import compile_for

    shape = (4096, 4096)
    weight = Triton(row_invariant=False).pack(zeros(LAYOUTS[kind], shape, dtype=dtype, device="cpu"))
    experts, starts = stacked([weight, weight]), torch.zeros(3, dtype=torch.int64)
    for tile in tiles_of(weight, dtype):
        x, out, bias = *(torch.empty(tile.rows, 4096, dtype=dtype) for _ in range(2)), torch.empty(4096, dtype=dtype)
        found = launches(x, weight, bias, out, tile=replace(tile, splits=4))
        if tile.inputs is None:  # a tile of one row serves one weight
            found += launches(x, experts, bias.expand(2, 4096), out, tile=for_experts(tile), starts=starts)
        for launch in found:
            compile_for(launch, capability).assert_fits(capability)


def test_an_odd_number_of_groups_is_refused() -> None:
    spec = LinearSpec(in_features=48, out_features=64, layout=NVFP4, dtype=torch.float32, device_type="cuda")
    backend = Triton(row_invariant=True)
    if backend.refuses(LinearSpec(**{**vars(spec), "in_features": 64})) is None:
        assert backend.refuses(spec) == "it takes a multiple of 32 inputs, not 48"
