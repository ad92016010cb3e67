"""Torch's FP8 product of blocks where a tile of ours may stand: who may take it, and the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.kernels import triton as kernels
from hf_accel.linear.backends.reference import REFERENCES
from hf_accel.linear.formats import readable
from tests.devices import triton_device

from .test_quantized_linear import BF16, FLOATS8, FP16, TOLERANCE, runs, weight_of, weight_of_zeros

pytest.importorskip("triton")
from hf_accel.kernels.triton.quantized_linear import stacked
from hf_accel.linear.backends import tiles
from hf_accel.linear.backends.backend import FEW_ROWS
from hf_accel.linear.backends.tiles import TorchBlocks, by_output, serves


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "capability", lambda: (9, 0))


@pytest.fixture
def torch_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Where there is no Hopper, torch._scaled_mm by its C++ source (ScaledBlas.cpp): what it takes, and no more.

    Returns the rows of each call.
    """
    rows: list[int] = []
    multiply = torch._scaled_mm

    def scaled_mm(
        a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: Any
    ) -> Any:
        (m, k), n = a.shape, b.shape[1]
        rows.append(m)
        assert a.is_contiguous() and b.t().is_contiguous() and a.dtype is b.dtype is torch.float8_e4m3fn
        assert m % 16 == n % 16 == k % 128 == 0 and out_dtype is BF16 and (bias is None or bias.dtype is BF16)
        assert scale_a.dtype is scale_b.dtype is torch.float32
        assert (scale_a.shape, scale_a.stride()) == ((m, k // 128), (1, m))
        assert (scale_b.shape, scale_b.stride()) == ((k // 128, n), (n, 1))
        if a.is_cuda and torch.cuda.get_device_capability()[0] == 9:
            try:
                return multiply(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype)
            except NotImplementedError as error:  # before CUDA 12.9
                pytest.skip(str(error))
        left = a.double().view(m, -1, 128) * scale_a[:, :, None]
        right = b.t().double().view(n, -1, 128) * scale_b.t()[:, :, None]
        out = left.flatten(1) @ right.flatten(1).t()
        return (out if bias is None else out + bias).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    yield rows


@pytest.mark.parametrize(
    ("kind", "shape", "group", "dtype", "expected"),
    [
        ("fp8", (64, 256), 128, BF16, True), ("fp8 groups", (64, 256), 128, BF16, True),
        ("fp8 groups", (64, 256), 64, BF16, False), ("fp8", (64, 192), 128, BF16, False),
        ("fp8", (40, 256), 128, BF16, False), ("fp8", (64, 256), 128, FP16, False),
        ("int8", (64, 256), 128, BF16, False), ("int4", (64, 256), 128, BF16, False),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_serves(
    kind: str, shape: Any, group: int, dtype: torch.dtype, expected: bool, monkeypatch: Any
) -> None:
    """On a Hopper alone: torch refuses these scales before it and after it."""
    weight = weight_of_zeros(kind, shape, dtype=dtype, group=group)
    for capability in ((9, 0), (8, 9), (8, 0), (10, 0), (12, 0), (0, 0)):
        monkeypatch.setattr(kernels, "capability", lambda found=capability: found)
        assert serves(weight, dtype) == (expected and capability == (9, 0))


@pytest.mark.usefixtures("hopper")
def test_a_candidate_for_many_rows_that_may_be_rounded() -> None:
    weight = weight_of_zeros("fp8", (64, 256), dtype=BF16)
    experts = stacked([weight, weight])
    for rows in (1, FEW_ROWS, FEW_ROWS + 1, 2048):
        for rounding in ("never", "many rows", "always"):
            is_one = rows > FEW_ROWS and rounding != "never"
            assert (TorchBlocks() in tiles.candidates(rows, weight, BF16, rounding)) == is_one
            assert TorchBlocks() not in tiles.candidates(rows, experts, BF16, rounding)
            assert tiles.by_rule(rows, weight, BF16, rounding) != TorchBlocks(), "unmeasured"
    assert tiles.key_of(experts, BF16, "always") != tiles.key_of(weight, BF16, "always")


def test_the_weight_output_by_output() -> None:
    for kind in ("fp8", "fp8 groups"):
        weight = weight_of(kind, (48, 256), group=128, dtype=BF16)
        numbers = by_output(FLOATS8.pack(weight))
        assert numbers.is_contiguous() and torch.equal(readable(numbers), readable(weight.weight))


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "fp8 groups"])
def test_the_numbers_of_our_tiles(kind: str, torch_of_a_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(kind, (48, 256), group=128, dtype=BF16)
    packed = FLOATS8.pack(weight)
    device = triton_device()
    x, bias = torch.randn(35, 256, device=device).to(BF16), torch.randn(48, device=device).to(BF16)
    x[3, 5], x[4, 200] = float("nan"), float("inf")
    x[5, :128] *= 1e-38
    expected = REFERENCES["fp8"].run(x.double(), weight, bias.double())
    size = (x.double() ** 2 @ weight.dequantize(torch.float64).t() ** 2).sqrt() + expected.abs()
    for given, wanted in ((bias, expected), (None, expected - bias.double())):
        got = tiles.multiply(x, packed, given, TorchBlocks())
        assert got.dtype is BF16 and got.shape == (35, 48)
        assert got.isnan().any(1).nonzero().flatten().tolist() == [3, 4]
        assert ((got.double() - wanted).abs() <= TOLERANCE[BF16] * size)[wanted.isfinite()].all()
    assert torch_of_a_gpu == [48, 48], "cuBLAS takes whole multiples of 16 rows"
    measured = ((16, None), (2048, TorchBlocks()))
    monkeypatch.setattr(tiles, "MEASURED", {tiles.key_of(packed, BF16, "always"): measured})
    many = x[7:8].repeat(17, 1)
    FLOATS8.run(many, packed, None), FLOATS8.run(many[:-1], packed, None)
    assert len(torch_of_a_gpu) == 3, "what was measured is not taken"
    by_row = type(FLOATS8)(row_invariant=True, rounding="always", rounded_to="fp8")
    by_row.run(many, packed, None)
    assert len(torch_of_a_gpu) == 3, "one tile serves any number of rows where they must agree"


@runs
@pytest.mark.gpu
def test_experts_keep_a_tile_of_ours(torch_of_a_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are multiplied in one launch, whatever was measured for a Linear of their shape."""
    parts = [FLOATS8.pack(weight_of("fp8", (48, 256), dtype=BF16)) for _ in range(2)]
    measured = ((2048, TorchBlocks()),)
    monkeypatch.setattr(tiles, "MEASURED", {tiles.key_of(parts[0], BF16, "always"): measured})
    experts = FLOATS8.experts(parts)
    assert experts is not None
    x = torch.randn(12, 256, device=triton_device()).to(BF16)
    starts = torch.tensor([0, 5, 12], device=x.device)
    got = experts.run(x, starts, None)
    assert not torch_of_a_gpu
    alone = replace(tiles.tiles_of(parts[0], BF16, "always")[0])
    from hf_accel.kernels.triton.quantized_linear import quantized_linear

    torch.testing.assert_close(got[5:], quantized_linear(x[5:], parts[1], None, tile=alone))
