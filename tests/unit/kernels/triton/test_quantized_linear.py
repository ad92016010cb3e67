"""The Triton kernel of quantized linears: every tile on every GPU, what it moves, and edges of shapes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from hf_accel.kernels import triton as kernels
from hf_accel.linear import Float8Weight, Int4Weight, Int8Weight, LinearSpec, choose
from hf_accel.linear.activations import round_groups
from hf_accel.linear.backends.registry import BackendChoice
from hf_accel.linear.backends.triton import Triton
from hf_accel.linear.experts import ExpertWeights, parts_of
from hf_accel.linear.formats import QuantizedWeight, readable, zeros
from tests.devices import triton_device

from .processes import compiled, interpreted

pytest.importorskip("triton")
from hf_accel.kernels.triton.quantized_linear import launches, numbers_launch, quantized_linear, stacked
from hf_accel.linear.backends import tiles as tiles_module
from hf_accel.linear.backends.tiles import for_experts, one_tile, tile_for, tiles_of
from tests.unit.linear.specs import linear_spec

runs = pytest.mark.skipif(kernels.refusal(triton_device()) is not None, reason=str(kernels.refusal(triton_device())))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {FP32: 3e-6, BF16: 2.0**-6, FP16: 2.0**-9}
LONG = pytest.mark.long
INTEGERS = Triton(row_invariant=True, rounding="always")
FLOATS8 = Triton(row_invariant=False, rounding="always", rounded_to="fp8")
BY_OUTPUT = ("int8", "fp8")
KINDS = ["int8", "int8 groups", "int8 minima", "int4", "int4 zero points", "int4 minima", "fp8", "fp8 groups"]
FEW_KINDS = [pytest.param(k, marks=[] if k in ("int8", "int4 zero points", "fp8") else [LONG]) for k in KINDS]

GROUPS = {k: (128,) if k in BY_OUTPUT else (16, 32, 128) if k[:4] == "int8" else (32, 64, 128) for k in KINDS}
QUICK = {  # a GPU each; the others are long
    ("int8", 128, BF16): 80, ("int4", 32, FP16): 89, ("int4", 128, BF16): 90, ("fp8", 128, BF16): 90,
}  # fmt: skip


def spec_of(kind: str, shape: tuple[int, int], *, dtype: torch.dtype, group: int = 128) -> LinearSpec:
    return linear_spec(
        in_features=shape[1], out_features=shape[0], bits=4 if kind.startswith("int4") else 8, dtype=dtype,
        group_size=group, symmetric=kind != "int4 zero points", minima=kind.endswith("minima"),
        by_group=kind in ("int8 groups", "int8 minima", "fp8 groups"), format="fp8" if "fp8" in kind else "int",
    )  # fmt: skip


def always(kind: str) -> Triton:
    """What rounds all rows."""
    return FLOATS8 if "fp8" in kind else INTEGERS


def weight_of(kind: str, shape: tuple[int, int], *, group: int = 32, dtype: torch.dtype = FP32) -> QuantizedWeight:
    device, (outputs, inputs) = triton_device(), shape
    groups = 1 if kind in BY_OUTPUT else inputs // group
    scale = (torch.rand(outputs, groups, device=device) * 0.01 + 0.001).to(dtype)
    minimum = torch.rand(outputs, groups, device=device).mul(0.1).to(dtype) if kind.endswith("minima") else None
    if "fp8" in kind:
        return Float8Weight((torch.randn(shape, device=device) * 60).clamp_(-448, 448).to(torch.float8_e4m3fn), scale)
    if kind.startswith("int8"):
        return Int8Weight(torch.randint(-128, 128, shape, dtype=torch.int8, device=device), scale, None, minimum)
    integers = torch.randint(-8, 8, shape, dtype=torch.int8, device=device)
    zeros_ = torch.randint(-8, 8, scale.shape, dtype=torch.int8, device=device) if kind.endswith("points") else None
    made = Int4Weight.from_integers(integers, scale, zeros_)
    return Int4Weight(made.weight_packed, scale, made.weight_shape, made.weight_zero_point, minimum)


def weight_of_zeros(kind: str, shape: tuple[int, int], *, dtype: torch.dtype, group: int = 128, device: str = "cpu"):
    layout = spec_of(kind, shape, dtype=dtype, group=group).layout
    return Triton(row_invariant=False).pack(zeros(layout, shape, dtype=dtype, device=device))


@compiled
@pytest.mark.parametrize(
    ("kind", "group", "dtype", "capability"),
    [
        pytest.param(*case, part, marks=[] if QUICK.get(case) == part else [LONG])
        for case in ((kind, group, dtype) for kind in KINDS for group in GROUPS[kind] for dtype in (BF16, FP16, FP32))
        for part in (80, 89, 90)
    ],
    ids=str,
)
@pytest.mark.parametrize("rounding", ["never", "always"])
def test_every_tile_fits_every_gpu(kind, group, dtype, capability, rounding):
    from tests.unit.kernels.triton.compiling import compile_for

    spec, shape = spec_of(kind, (4096, 4096), dtype=dtype, group=group), (4096, 4096)
    if rounding == "always" and always(kind).unserved(spec):
        pytest.skip(always(kind).unserved(spec))
    if rounding == "always" and "fp8" in kind and capability < 89:
        pytest.skip("this GPU does not multiply FP8, and the backend refuses")
    weight = weight_of_zeros(kind, shape, dtype=dtype, group=group)
    tiles = tiles_of(weight, dtype, rounding)
    only = one_tile(weight, dtype, rounding)
    assert only in tiles or (only is None and rounding == "always")
    experts, starts = stacked([weight, weight]), torch.zeros(3, dtype=torch.int64)
    if rounding == "never":
        compile_for(numbers_launch(weight, torch.empty(shape, dtype=dtype)), capability).assert_fits(capability)
    for tile in tiles:
        x, out = (torch.empty(tile.rows, 4096, dtype=dtype) for _ in range(2))
        bias = torch.empty(4096, dtype=dtype)
        splits = 4 if tile is tiles[1] and not tile.rounded else 1
        found = launches(x, weight, bias, out, tile=replace(tile, splits=splits))
        if tile.inputs is None:
            found += launches(x, experts, bias.expand(2, 4096), out, tile=for_experts(tile), starts=starts)
        for launch in found:
            compile_for(launch, capability).assert_fits(capability)


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [pytest.param(FP32, marks=LONG), BF16, pytest.param(FP16, marks=LONG)], ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [pytest.param(70, 192, marks=LONG), (1, 64), pytest.param(129, 64, marks=LONG)]
)
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_every_tile_and_split_agrees_with_the_reference(kind, outputs, inputs, dtype):
    weight = weight_of(kind, (outputs, inputs), dtype=FP16)
    packed = Triton(row_invariant=False).pack(weight)
    x = torch.randn(35, inputs, device=triton_device()).to(dtype)
    bias = torch.randn(outputs, device=x.device).to(dtype)
    dense = weight.dequantize(torch.float64)
    expected = x.double() @ dense.t() + bias.double()
    size = (x.double() ** 2 @ dense.t() ** 2).sqrt() + expected.abs()
    for tile in tiles_of(packed, dtype):
        for splits in (1, 2, 3, 7):
            got = quantized_linear(x, packed, bias, tile=replace(tile, splits=splits))
            assert got.dtype is dtype
            assert ((got.double() - expected).abs() <= TOLERANCE[dtype] * size).all(), (tile, splits)


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, pytest.param(BF16, marks=LONG)], ids=str)
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_the_numbers_of_a_weight(kind, dtype):
    """What many rows are multiplied by; in the product, too."""
    weight = weight_of(kind, (70, 192), dtype=FP16)
    packed = Triton(row_invariant=False).pack(weight)
    dense = torch.empty(70, 192, dtype=dtype, device=triton_device())
    numbers_launch(packed, dense).run()
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(dense.double(), weight.dequantize(torch.float64), rtol=rounding, atol=1e-9)
    x, bias = torch.randn(5, 192, device=dense.device).to(dtype), torch.randn(70, device=dense.device)
    got = tiles_module.multiply(x, packed, bias, tiles_module.Dequantized())
    torch.testing.assert_close(got, torch.nn.functional.linear(x, dense, bias.to(dtype)), rtol=0, atol=0)


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [pytest.param(FP32, marks=LONG), BF16], ids=str)
@pytest.mark.parametrize(
    "counts", [pytest.param([0, 17, 1, 0, 40], marks=LONG), pytest.param([3], marks=LONG), [0, 0, 2, 1]], ids=str
)
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_experts_in_one_launch(kind, counts, dtype):
    weights = [weight_of(kind, (70, 96), dtype=FP16) for _ in counts]
    backend, device, count = Triton(row_invariant=True), triton_device(), len(counts)
    call = backend.experts([backend.pack(weight) for weight in weights])
    x, biases = torch.randn(sum(counts), 96).to(device, dtype), torch.randn(count, 70).to(device, dtype)
    starts = torch.tensor([0, *counts]).cumsum(0).to(device)
    for given in (None, biases):
        got = call.run(x, starts, given)
        rows = x.split(counts)
        parts = [backend.run(rows[i], call.parts[i], None if given is None else given[i]) for i in range(count)]
        assert torch.equal(got, torch.cat(parts))
        if len(x):
            found = [
                quantized_linear(x, call.weight, given, tile=tile, starts=starts)
                for tile in tiles_of(call.weight, dtype)
                if tile.inputs is None  # a tile of one row serves one weight
            ]
            freely = Triton(row_invariant=False).experts(call.parts)
            for other in (*found, freely.run(x, starts, given)):
                torch.testing.assert_close(other, got, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
    for part, weight in zip(call.parts, weights, strict=True):
        assert torch.equal(readable(backend.unpack(part).integers()), readable(weight.integers()))


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [pytest.param(FP32, marks=LONG), BF16], ids=str)
@pytest.mark.parametrize(
    "kind", [pytest.param("int8", marks=LONG), pytest.param("int8 groups", marks=LONG), "int4 zero points"]
)
def test_rounded_rows_have_the_same_bits_in_every_tile_and_among_any_others(kind, dtype):
    """In a launch over experts too; and the levels are those of the CPU."""
    group = 128 if kind == "int8" else 64
    packed = INTEGERS.pack(weight_of(kind, (70, 192), group=group, dtype=dtype))
    x, bias = torch.randn(35, 192, device=triton_device()).to(dtype), torch.randn(70, device=triton_device()).to(dtype)
    x[3, 5], x[4, 100] = float("nan"), float("inf")
    x[5, :128] *= 1e-38
    expected = INTEGERS.run(x, packed, bias)
    assert expected.isnan().any(1).nonzero().flatten().tolist() == [3, 4]
    for tile in tiles_of(packed, dtype, "always"):
        assert torch.equal(quantized_linear(x, packed, bias, tile=tile).nan_to_num(), expected.nan_to_num())
    assert torch.equal(INTEGERS.run(x[7:8], packed, bias), expected[7:8])
    call = INTEGERS.experts([packed, packed, packed])
    starts = torch.tensor([0, 20, 20, 35], device=x.device)
    together = call.run(x, starts, bias.expand(3, 70))
    assert torch.equal(together.nan_to_num(), expected.nan_to_num())
    rounding = launches(x, packed, bias, expected, tile=tiles_of(packed, dtype, "always")[0])[0]
    rounding.run()
    levels, factors = rounding.arguments["levels"].float(), rounding.arguments["factors"]
    got = (levels.view(35, -1, group) * factors[:, :, None]).flatten(1)[:, :192]
    torch.testing.assert_close(got, round_groups(x, group), rtol=0, atol=0, equal_nan=True)


@runs
@pytest.mark.gpu
def test_many_rows_are_rounded_and_few_are_not(monkeypatch):
    monkeypatch.setattr(tiles_module, "FEW_ROWS", 4)
    backend, weight = Triton(row_invariant=False, rounding="many rows"), weight_of("int4", (9, 64), group=64)
    packed, x = backend.pack(weight), torch.randn(5, 64, device=triton_device()).bfloat16()
    assert torch.equal(backend.run(x, packed, None), INTEGERS.run(x, packed, None))
    floats = Triton(row_invariant=False)
    assert torch.equal(backend.run(x[1:], packed, None), floats.run(x[1:], packed, None))
    assert not torch.equal(INTEGERS.run(x[1:], packed, None), floats.run(x[1:], packed, None))


@pytest.mark.parametrize(
    ("kind", "group", "reason"),
    [
        ("int8", 128, None),
        ("int8 groups", 32, None),
        ("int8 groups", 16, "with INT8 activations it takes groups of a multiple of 32 inputs, not 16"),
        ("int8 minima", 32, "it takes no minima with INT8 activations"),
        ("int4 zero points", 64, None),
        ("int4", 32, "with INT8 activations it takes groups of a multiple of 64 inputs, not 32"),
        ("int4 minima", 64, "it takes no minima with INT8 activations"),
        ("fp8", 128, None),
    ],
)
def test_what_is_multiplied_in_8_bits(kind, group, reason, monkeypatch):
    rounded_to = "fp8" if "fp8" in kind else "int8"
    monkeypatch.setattr(kernels, "capability", lambda: (8, 9))
    spec = replace(spec_of(kind, (70, 128), dtype=BF16, group=group), device_type="cuda")
    monkeypatch.setattr(kernels, "refusal", lambda device_type: None)
    for backend in (always(kind), Triton(row_invariant=False, rounding="many rows", rounded_to=rounded_to)):
        assert backend.reads(spec) and backend.refuses(spec) == reason
        assert backend.refuses(replace(spec, activations=None)) == f"it rounds activations to {rounded_to.upper()}"
    assert Triton(row_invariant=False).refuses(spec) is None
    choose.cache_clear()
    for row_invariant in (False, True):
        chosen = choose(spec, row_invariant=row_invariant)
        if row_invariant:  # integers have the same bits in every tile, and floats in one tile alone
            rounding = "never" if reason or rounded_to == "fp8" else "always"
        else:
            rounding = "never" if reason else "many rows"
        assert (chosen.backend.name, chosen.backend.rounding, chosen.refusals) == ("triton", rounding, ())
    if reason is None:
        chosen = choose(replace(spec, activations=rounded_to))
        assert (chosen.backend.rounding, chosen.backend.activations) == ("always", rounded_to)
    choose.cache_clear()


@runs
@pytest.mark.gpu
@torch.no_grad()
def test_a_layer_of_experts_goes_in_one_launch():
    weight = weight_of("int4", (4 * 70, 96))
    spec = LinearSpec.of_stored(weight, "auto")
    backend = Triton(row_invariant=False)
    choice = BackendChoice(replace(spec, out_features=70), backend, ())
    layer = ExpertWeights.from_packed([backend.pack(p) for p in parts_of(weight, 4)], choice=choice)
    x, starts = torch.randn(7, 96, device=triton_device()), torch.tensor([0, 2, 2, 6, 7], device=triton_device())
    assert layer.runs_together(x)
    expected = torch.cat([layer(x[:2], 0), layer(x[2:6], 2), layer(x[6:], 3)])
    for each in (layer, layer.sibling()):
        torch.testing.assert_close(each.together(x, starts, None), expected)
        assert torch.equal(each.quantized.integers(), weight.integers())
    with torch.enable_grad():
        assert not layer.runs_together(x)


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("group", [16, 32, 48, 96, 256])
@pytest.mark.parametrize("kind", ["int8 groups", "int4", pytest.param("fp8 groups", marks=LONG)])
def test_groups_of_other_sizes(kind, group):
    """Those that checkpoints of other programs may have."""
    shape = (40, 2 * group)
    backend, spec = Triton(row_invariant=False), spec_of(kind, shape, dtype=FP32, group=group)
    reason = backend.refuses(replace(spec, device_type=triton_device()))
    least = 16 if kind == "int8 groups" else 32
    if group % least:
        assert reason == f"it takes groups of a multiple of {least} inputs, not {group}"
        return
    weight = weight_of(kind, shape, group=group)
    packed = backend.pack(weight)
    x = torch.randn(3, shape[1], device=triton_device())
    torch.testing.assert_close(backend.run(x, packed, None), x @ weight.dequantize(FP32).t(), rtol=1e-4, atol=1e-5)
    assert torch.equal(readable(backend.unpack(packed).integers()), readable(weight.integers()))


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [pytest.param(FP32, marks=LONG), BF16, pytest.param(FP16, marks=LONG)], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4", pytest.param("fp8", marks=LONG)])
def test_a_row_does_not_depend_on_the_others(kind, dtype):
    backend, weight = Triton(row_invariant=True), weight_of(kind, (70, 256), dtype=dtype)
    packed = backend.pack(weight)
    x = torch.randn(70, 256, device=triton_device()).to(dtype)
    together = backend.run(x, packed, None)
    for row in (0, 31, 32, 69):
        assert torch.equal(backend.run(x[row : row + 1], packed, None), together[row : row + 1])


@interpreted
@pytest.mark.parametrize("kind", ["int4", "int4 zero points", "int8", "fp8"])
def test_few_rows_move_the_weight_once(kind):
    """And the rows once for each 16 outputs."""
    from tests.unit.kernels.triton.bytes_moved import counted

    shape = (128, 2048)
    spec = spec_of(kind, shape, dtype=BF16)
    weight = zeros(spec.layout, shape, dtype=BF16, device="cpu")
    backend = Triton(row_invariant=False)
    packed = backend.pack(weight)
    for rows in (1, 5):
        x, tile = torch.randn(rows, 2048).to(BF16), tile_for(rows, packed, BF16)
        assert tile.inputs and (tile.outputs, tile.rows) == (16, 8)
        with counted() as moved:
            out = backend.run(x, packed, None)
        assert spec.weight_bytes <= moved.loaded - shape[0] // 16 * x.nbytes <= 1.15 * spec.weight_bytes
        assert moved.stored == out.nbytes


@interpreted
@pytest.mark.parametrize("rows", [2, 16, 33, 65])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_a_weight_is_read_once_for_each_tile_of_rows(kind, rows):
    """And the rows once for each tile of outputs, which the cache serves."""
    from tests.unit.kernels.triton.bytes_moved import counted

    shape = (300, 512)
    spec = spec_of(kind, shape, dtype=FP16)
    packed = Triton(row_invariant=False).pack(zeros(spec.layout, shape, dtype=FP16, device="cpu"))
    x, tile = torch.randn(rows, shape[1]).to(FP16), tile_for(rows, packed, FP16)
    with counted() as moved:
        out = quantized_linear(x, packed, None, tile=tile)
    row_tiles, output_tiles = -(-rows // tile.rows), -(-300 // tile.outputs)
    assert tile.splits == 1
    assert moved.loaded == row_tiles * spec.weight_bytes + output_tiles * x.nbytes
    assert moved.stored == out.nbytes


def test_splits_keep_a_gpu_busy_and_cost_little():
    def splits(rows: int, shape: tuple[int, int]) -> int:
        return tile_for(rows, weight_of_zeros("int4", shape, dtype=BF16, device="meta"), BF16).splits

    shapes = (1024, 4096), (4096, 4096), (16384, 4096), (65536, 4096), (4096, 512)
    assert [splits(9, shape) for shape in shapes] == [7, 4, 1, 1, 1]
    assert [splits(rows, (1024, 4096)) for rows in (9, 16, 32, 64, 4096)] == [7, 4, 2, 1, 1]
    assert all(splits(rows, shape) == 1 for rows in (1, 2, 8) for shape in shapes)


@interpreted
@pytest.mark.parametrize("kind", ["int4 zero points", "int8"])
def test_compiled_graphs_record_one_operator(kind, monkeypatch):
    backend = Triton(row_invariant=True, rounding="never" if kind == "int8" else "always")
    packed = backend.pack(weight_of(kind, (40, 128), group=64))
    x, bias = torch.randn(3, 128), torch.randn(40)
    expected = backend.run(x, packed, bias)
    compiled_run = torch.compile(lambda x: backend.run(x, packed, bias) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled_run(x), expected * 2)
    tensors = (x, packed.integers, packed.scale, packed.zero_point, None, packed.divisor, bias)
    operands = (*tensors, packed.in_features, True, backend.rounding, json.dumps(packed.layout.settings))
    torch.library.opcheck(torch.ops.hf_accel.blocked_linear, operands, test_utils=("test_schema", "test_faketensor"))
