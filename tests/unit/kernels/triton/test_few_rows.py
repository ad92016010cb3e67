"""A few rows times up to three weights: bits depend on no other row, and on no other weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.kernels.triton.blocked_weight import BlockedWeight, LinearTile
from hf_accel.kernels.triton.few_rows import few_launch, takes_few_rows
from hf_accel.kernels.triton.layer_parts import gated
from hf_accel.kernels.triton.quantized_linear import stacked
from hf_accel.linear.backends.tiles import EIGHT, MANY_OUTPUTS, MORE, eight, more
from hf_accel.linear.backends.triton import Triton
from tests.devices import triton_device

from .processes import compiled
from .test_quantized_linear import BF16, FP16, FP32, KINDS, runs, weight_of, weight_of_zeros

BACKEND = Triton(row_invariant=False)


def packed(
    kind: str, outputs: list[int], inputs: int, dtype: torch.dtype = BF16, *, group: int = 128
) -> list[BlockedWeight]:
    return [BACKEND.pack(weight_of(kind, (count, inputs), group=group, dtype=dtype)) for count in outputs]


def tile_of(weight: BlockedWeight, size: tuple[int, int] = (16, 8)) -> LinearTile:
    return LinearTile(outputs=size[0], rows=size[1], inputs=4 * 512 // weight.bits, num_warps=2, num_stages=1)


def product(x: Tensor, weights: list[BlockedWeight], biases: list[Any], **settings: Any) -> list[Tensor]:
    settings = {"tile": tile_of(weights[0]), **settings}
    kept = weights[:1] if "activation" in settings else weights
    outs = [x.new_full((len(x), weight.out_features), float("nan")) for weight in kept]
    few_launch(x, weights, biases, outs, **settings).run()
    return outs


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "group", "dtype", "size"),
    [
        ([70, 48, 5], 640, 128, BF16, (16, 8)), ([32, 64], 1024, 128, FP16, (32, 16)),
        ([70, 48, 5], 672, 32, BF16, (64, 32)),  # blocks of fewer bytes, and without groups one that is cut
    ],
    ids=str,
)  # fmt: skip
def test_rows_times_weights(
    kind: str, outputs: list[int], inputs: int, group: int, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    weights = packed(kind, outputs, inputs, dtype, group=group)
    assert all(takes_few_rows(weight, dtype) for weight in weights)
    rows, tile = size[1] + 3, tile_of(weights[0], size)  # more than a tile has
    x = torch.randn(rows, inputs, device=triton_device()).to(dtype)
    biases = [torch.randn(outputs[0], device=x.device).to(dtype), *[None] * (len(outputs) - 1)]
    found = product(x, weights, biases, tile=tile)
    for weight, bias, out in zip(weights, biases, found, strict=True):
        dense = BACKEND.unpack(weight).dequantize(torch.float64)
        expected = x.double() @ dense.t() + (0 if bias is None else bias.double())
        size = (x.double() ** 2 @ dense.t() ** 2).sqrt() + expected.abs()
        assert ((out.double() - expected).abs() / size).max() < (2.0**-7 if dtype is BF16 else 2.0**-9)
        assert torch.equal(out, product(x, [weight], [bias], tile=tile)[0])
    for row in (0, 3, rows - 1):
        alone = product(x[row : row + 1].contiguous(), weights, biases, tile=tile)
        assert all(torch.equal(one[0], out[row]) for one, out in zip(alone, found, strict=True))


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "int4", "int4 minima", "int4 zero points"])
@pytest.mark.parametrize(("outputs", "activation", "size"), [(70, "silu", (16, 8)), (64, "gelu", (16, 16))])
def test_gates(kind: str, outputs: int, activation: str, size: tuple[int, int]) -> None:
    weights, x = packed(kind, [outputs] * 2, 640), torch.randn(3, 640, device=triton_device()).to(BF16)
    tile = tile_of(weights[0], size)
    biases = [None, torch.randn(outputs, device=x.device).to(BF16)]
    [out] = product(x, weights, biases, activation=activation, tile=tile)
    halves = [product(x, [weight], [bias], tile=tile)[0] for weight, bias in zip(weights, biases, strict=True)]
    assert torch.equal(out, gated(*halves, activation=activation))


def test_what_they_take() -> None:
    [weight] = packed("int8", [8], 128)
    assert takes_few_rows(weight, BF16) and takes_few_rows(weight, FP16) and not takes_few_rows(weight, FP32)
    assert not takes_few_rows(stacked([weight, weight]), BF16)


@compiled
@pytest.mark.parametrize(
    ("kind", "group", "capability"),
    [
        ("int8", 128, 90), ("int4", 128, 80), ("int4 zero points", 32, 90),
        *(pytest.param(k, g, c, marks=pytest.mark.long) for k in KINDS for g in (32, 128) for c in (80, 89, 90)),
    ],
)  # fmt: skip
def test_they_fit_every_gpu(kind: str, group: int, capability: int) -> None:
    """A weight stays in registers: no shared memory but for the sums of the warps."""
    from tests.unit.kernels.triton.compiling import compile_for

    weights = [weight_of_zeros(kind, (MANY_OUTPUTS, 4096), dtype=BF16, group=group) for _ in range(3)]
    x, outs = torch.zeros(1, 4096, dtype=BF16), [torch.zeros(1, MANY_OUTPUTS, dtype=BF16) for _ in range(3)]
    tiles = [*eight(weights[0]), *more(weights[0])]
    assert len(tiles) == len(EIGHT) + len(MORE)
    for tile in tiles if capability == 89 else [tiles[len(EIGHT) - 1]] if group == 32 else tiles[:1]:
        for count in (1, 3):
            launch = few_launch(x, weights[:count], [None] * count, outs[:count], tile=tile)
            used = compile_for(launch, capability)
            used.assert_fits(capability)
            assert used.shared <= 2 * tile.num_warps * tile.outputs * tile.rows * 4 or kind != "int8"
        launch = few_launch(x, weights[:2], [None, None], outs[:1], tile=tile, activation="silu")
        compile_for(launch, capability).assert_fits(capability)
