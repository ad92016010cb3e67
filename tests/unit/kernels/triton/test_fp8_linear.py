"""FP8 weights through the Triton kernels: rows that are rounded to FP8 too, and who takes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_accel.kernels import triton as kernels
from hf_accel.linear import choose
from hf_accel.linear.activations import round_groups
from hf_accel.linear.backends.reference import REFERENCES
from hf_accel.linear.backends.triton import Triton
from tests.devices import FP8_ON_A_GPU, triton_device

from .test_quantized_linear import BF16, FLOATS8, FP32, LONG, TOLERANCE, runs, spec_of, weight_of

pytest.importorskip("triton")
from hf_accel.kernels.triton.quantized_linear import launches, quantized_linear
from hf_accel.linear.backends.tiles import tiles_of


def test_a_gpu_that_multiplies_no_fp8_keeps_floats(monkeypatch):
    spec = replace(spec_of("fp8", (64, 128), dtype=BF16), device_type="cuda")
    monkeypatch.setattr(kernels, "refusal", lambda device_type: None)
    monkeypatch.setattr(kernels, "capability", lambda: (8, 0))
    chosen = choose.__wrapped__(spec)
    assert (chosen.backend.name, chosen.backend.rounding) == ("triton", "never")
    rounded = choose.__wrapped__(replace(spec, activations="fp8"))
    assert rounded.backend.name == "reference" and rounded.backend.activations == "fp8"
    assert "compute capability 8.9" in dict(rounded.refusals)["triton"]


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [pytest.param(FP32, marks=LONG), BF16], ids=str)
@pytest.mark.parametrize("kind", ["fp8", pytest.param("fp8 groups", marks=LONG)])
def test_rows_rounded_to_fp8_in_every_tile(kind, dtype):
    """The levels are the reference's, bit for bit, and one tile serves any number of rows where rows must agree."""
    group = 128 if kind == "fp8" else 64
    weight = weight_of(kind, (70, 192), group=group, dtype=dtype)
    packed = FLOATS8.pack(weight)
    x, bias = torch.randn(35, 192, device=triton_device()).to(dtype), torch.randn(70, device=triton_device()).to(dtype)
    x[3, 5], x[4, 100] = float("nan"), float("inf")
    x[5, :128] *= 1e-38
    x[6] *= torch.logspace(-6, 6, 192, device=x.device)
    expected = REFERENCES["fp8"].run(x.double(), weight, bias.double())
    size = (x.double() ** 2 @ weight.dequantize(torch.float64).t() ** 2).sqrt() + expected.abs()
    for tile in tiles_of(packed, dtype, "always"):
        got = quantized_linear(x, packed, bias, tile=tile)
        assert got.isnan().any(1).nonzero().flatten().tolist() == [3, 4]
        tolerance = max(TOLERANCE[dtype], FP8_ON_A_GPU) if triton_device() == "cuda" else TOLERANCE[dtype]
        close = (got.double() - expected).abs() <= tolerance * size
        assert close[expected.isfinite()].all(), tile
    by_row = Triton(row_invariant=True, rounding="always", rounded_to="fp8")
    together = by_row.run(x[7:], packed, bias)
    for row in (7, 34):
        assert torch.equal(by_row.run(x[row : row + 1], packed, bias), together[row - 7 : row - 6])
    rounding = launches(x, packed, bias, expected.to(dtype), tile=tiles_of(packed, dtype, "always")[0])[0]
    rounding.run()
    levels, factors = rounding.arguments["levels"].view(torch.float8_e4m3fn), rounding.arguments["factors"]
    got = (levels.float().view(35, -1, group) * factors[:, :, None]).flatten(1)[:, :192]
    torch.testing.assert_close(got, round_groups(x, group, "fp8"), rtol=0, atol=0, equal_nan=True)
