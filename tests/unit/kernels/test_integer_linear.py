"""Products of 8, 4, 3 and 2 bits: exact integers in a group, groups added in order; the same bits everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_accel.config import WeightConfig
from hf_accel.kernels import cpu as kernels
from hf_accel.kernels.cpu.integer_linear import (
    IntegerLinear,
    PackedWeight,
    pack,
    quantize,
    stored_by_group,
    stored_scales,
    unpack,
)
from hf_accel.linear.formats import Int8Weight
from hf_accel.linear.methods import rtn

SHAPES = [(8, 1, 1, 128), (8, 37, 100, 128), (8, 64, 128, 128), (8, 130, 300, 128), (8, 200, 640, 128)]
SHAPES += [(4, 1, 32, 32), (4, 64, 96, 32), (4, 100, 192, 64), (4, 130, 384, 128)]
SHAPES += [(3, 1, 32, 32), (3, 64, 96, 32), (3, 100, 192, 64), (3, 130, 384, 128)]
SHAPES += [(2, 1, 32, 32), (2, 64, 96, 32), (2, 100, 192, 64), (2, 130, 384, 128)]
EIGHTS = [(37, 40, 8), (70, 120, 24)]  # groups that are no whole vectors of 16 lanes
ASYMMETRIC = [(4, 1, 32, 32), (4, 64, 96, 32), (4, 100, 192, 64), (4, 130, 384, 128)]
ASYMMETRIC += [(4, *shape) for shape in EIGHTS]
ASYMMETRIC += [(3, 1, 32, 32), (3, 70, 192, 96), (3, 130, 384, 128)]
ASYMMETRIC += [(2, 1, 16, 16), (2, 70, 240, 48), (2, 130, 384, 128)]
FEWER = [4, 3, 2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(bits: int, outputs: int, inputs: int, group: int, *, dtype: torch.dtype = torch.float32):
    """A packed weight, its integers and its scales [out, groups]."""
    quantized = rtn.quantize(
        torch.randn(outputs, inputs).to(dtype), WeightConfig(bits=bits, group_size=None if bits == 8 else group)
    )
    stored = quantized.weight if isinstance(quantized, Int8Weight) else quantized.weight_packed.view(torch.uint8)
    packed = pack(bits, stored, quantized.weight_scale)
    return packed, quantized.integers().numpy().astype(np.int64), quantized.weight_scale.float().numpy()


def exact_product(levels: np.ndarray, integers: np.ndarray) -> np.ndarray:
    """Return levels @ integers.T for integers of any type. In float64 their sums are exact, and many times faster."""
    return levels.astype(np.float64) @ integers.astype(np.float64).T


def oracle(x: torch.Tensor, integers: np.ndarray, scales: np.ndarray, *, bits: int, group: int) -> np.ndarray:
    """The documented arithmetic in numpy: each operation rounded to float32 on its own."""
    values, f32 = x.float().numpy(), np.float32
    out = np.zeros((len(values), len(integers)), f32)
    for g, start in enumerate(range(0, integers.shape[1], group)):
        part = values[:, start : start + group]
        absmax = np.abs(part).max(axis=1, keepdims=True)
        usable = absmax >= f32(1e-35)
        inverse = np.where(usable, f32(127) / np.where(usable, absmax, f32(1)), f32(0))
        share = exact_product(np.rint(part * inverse), integers[:, start : start + group]).astype(f32)
        if bits < 8:
            share = share * scales[:, g]
        out = out + share * np.where(usable, absmax / f32(127), f32(0))
    return out * scales[:, 0] if bits == 8 else out


@pytest.mark.parametrize(("bits", "outputs", "inputs", "group"), SHAPES)
def test_as_documented_on_every_instruction_set(isa, bits, outputs, inputs, group):
    packed, integers, scales = make(bits, outputs, inputs, group)
    linear = IntegerLinear([packed], [None])
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 48, 49, 100):
        x = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
        np.testing.assert_array_equal(linear(x).numpy(), oracle(x, integers, scales, bits=bits, group=group))


@pytest.mark.parametrize("bits", [8, *FEWER])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_rows_than_are_quantized_at_once(isa, bits, dtype):
    weights = [make(bits, outputs, 5664, 32)[0] for outputs in (70, 3)]
    x = (torch.randn(101, 5700) * torch.logspace(-3, 3, 101)[:, None]).to(dtype)[:, 4:5668]
    linear = IntegerLinear(weights, [torch.randn(70), None])
    assert torch.equal(linear(x), torch.cat([linear(row) for row in x.split(1)]))


@pytest.mark.parametrize("level", [-128, 127])
def test_int8_levels_at_the_ends_of_their_range(isa, level):
    """Sums of products of the largest magnitudes fit what instructions hold between the steps."""
    stored, scales = torch.full((70, 256), level, dtype=torch.int8), torch.ones(70, 1)
    linear, integers = IntegerLinear([pack(8, stored, scales)], [None]), stored.numpy().astype(np.int64)
    for rows in (1, 2, 4, 9, 40):
        for value in (-127.0, 127.0):
            x = torch.full((rows, 256), value)
            expected = oracle(x, integers, scales.numpy(), bits=8, group=128)
            np.testing.assert_array_equal(linear(x).numpy(), expected)


@pytest.mark.parametrize(("inputs", "group"), [(37, 128), (300, 128), (24, 8), (120, 40), (272, 136), (600, 200)])
def test_int8_levels_of_any_neighbours(isa, inputs, group):
    """Where a multiply-add saturates, neighbours that do not fit together are multiplied in two parts."""
    stored = torch.randint(-128, 128, (70, inputs), dtype=torch.int8)
    ends = torch.tensor([-128, 127], dtype=torch.int8)
    stored[:, ::3], stored[:, 1::3] = (ends[torch.randint(0, 2, stored[:, i::3].shape)] for i in (0, 1))
    groups = 1 if group == 128 else inputs // group  # with one, scales belong to outputs
    linear = IntegerLinear([pack(8, stored, torch.ones(70, groups))], [None])
    x = torch.randint(-127, 128, (48, inputs)).float()
    x[::2] = x[::2].sign() * (x[::2].abs() % 4 + 63)  # near half of what fits
    x[:, ::group] = 127.0  # so levels are what is given
    for rows in (1, 2, 7, 48):
        expected = oracle(x[:rows], stored.numpy().astype(np.int64), np.ones((70, 1), np.float32), bits=8, group=group)
        np.testing.assert_array_equal(linear(x[:rows]).numpy(), expected)


def stored_of(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Levels [out, in] in bytes, bit by bit: the first input in the lowest bits."""
    single = np.unpackbits(levels.numpy()[..., None], axis=-1, count=bits, bitorder="little")
    return torch.from_numpy(np.packbits(single.reshape(len(levels), -1), axis=-1, bitorder="little"))


def make_asymmetric(bits: int, outputs: int, inputs: int, group: int, *, dtype: torch.dtype = torch.float32):
    """A packed weight of any levels and zero points, level - zero as int64, and its scales."""
    levels = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (outputs, inputs // group), dtype=torch.uint8)
    zeros[0, 0], zeros[-1, -1] = 0, (1 << bits) - 1
    scales = (torch.rand(zeros.shape) * 0.01).to(dtype)
    packed = pack(bits, stored_of(levels, bits), scales, zeros)
    integers = levels.long() - zeros.long().repeat_interleave(group, dim=1)
    return packed, integers.numpy(), scales.float().numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "outputs", "inputs", "group"), ASYMMETRIC)
def test_zero_points_on_every_instruction_set(isa, bits, outputs, inputs, group, dtype):
    packed, integers, scales = make_asymmetric(bits, outputs, inputs, group, dtype=dtype)
    linear = IntegerLinear([packed], [None])
    for rows in (1, 2, 3, 5, 6, 7, 13, 49, 100):
        x = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
        np.testing.assert_array_equal(linear(x).numpy(), oracle(x, integers, scales, bits=bits, group=group))


@pytest.mark.parametrize("bits", FEWER)
def test_zero_points_at_the_ends_of_their_range(isa, bits):
    levels, most = torch.full((64, 16 * bits), 0xFF, dtype=torch.uint8), (1 << bits) - 1
    levels[32:] = 0
    zeros = torch.zeros(64, 1, dtype=torch.uint8)
    zeros[32:] = most
    packed = pack(bits, levels, torch.ones(64, 1), zeros)
    linear, expected = IntegerLinear([packed], [None]), [127.0 * most * 128] * 32 + [-127.0 * most * 128] * 32
    for rows in (1, 2, 4, 5, 8, 40):  # tiles of some heights sum up products in 16 bits
        assert linear(torch.full((rows, 128), 127.0)).tolist() == [expected] * rows
        assert linear(torch.full((rows, 128), -127.0)).tolist() == [[-value for value in expected]] * rows


@pytest.mark.parametrize("bits", FEWER)
def test_weights_with_and_without_zero_points_share_a_call(isa, bits):
    weights = [make_asymmetric(bits, outputs, 128, 32)[0] for outputs in (70, 3)]
    weights.insert(1, make(bits, 130, 128, 32)[0])
    x = torch.randn(10, 128).bfloat16()
    together = IntegerLinear(weights, [None] * 3)(x)
    assert torch.equal(together, torch.cat([IntegerLinear([w], [None])(x) for w in weights], dim=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "outputs", "inputs", "group"), [case for case in SHAPES if case[0] < 8])
def test_quantize_asymmetric_as_round_to_nearest(isa, bits, outputs, inputs, group, dtype):
    weight = torch.randn(inputs, outputs).to(dtype).t()
    weight[0, :group] = 0  # scale 0
    if outputs > 1:
        weight[1, :group] = weight[1, :group].abs()
        weight[2, :group] = -weight[2, :group].abs()
        weight[3, :group] *= torch.finfo(dtype).max / weight[3, :group].abs().max()  # a range that overflows
        weight[4, :group] *= torch.finfo(dtype).tiny / 8
    expected = rtn.quantize(weight, WeightConfig(bits=bits, group_size=group, symmetric=False))
    result = quantize(bits, weight, group, symmetric=False)
    assert result is not None
    packed, scales = result
    assert scales.isfinite().all()
    assert torch.equal(scales, expected.weight_scale)
    assert torch.equal(stored_scales(packed, dtype), expected.weight_scale)
    assert torch.equal(stored_by_group(packed, "zeros").to(torch.int8) - (1 << bits - 1), expected.zero_points())
    assert torch.equal(unpack(packed), expected.weight_packed.view(torch.uint8))


GROUPED = [(1, 32, 32), (64, 96, 16), (100, 192, 64), (130, 384, 128), (70, 512, 256)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "group"), [*GROUPED, *EIGHTS])
def test_int8_with_scales_of_groups(isa, outputs, inputs, group, dtype):
    """Of either sign, and with the level -128: other programs store both."""
    stored = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    scales = torch.randn(outputs, inputs // group).to(dtype)
    packed = pack(8, stored, scales)
    assert torch.equal(unpack(packed), stored) and torch.equal(stored_scales(packed, dtype), scales)
    assert packed.activation_group == (group if inputs > group else 128)
    linear, integers = IntegerLinear([packed], [None]), stored.numpy().astype(np.int64)
    bits = 4 if inputs > group else 8  # how the oracle scales, by group or by output
    for rows in (1, 2, 3, 4, 7, 49, 100):
        x = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
        expected = oracle(x, integers, scales.float().numpy(), bits=bits, group=group if bits == 4 else 128)
        np.testing.assert_array_equal(linear(x).numpy(), expected)


def oracle_with_minima(
    x: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor
) -> np.ndarray:
    """As `oracle`: a group's share is sum(x q) * scale - minimum * sum(x)."""
    values, f32, group = x.float().numpy(), np.float32, levels.shape[1] // scales.shape[1]
    q, out = levels.numpy().astype(np.int64), np.zeros((len(values), len(levels)), np.float32)
    for g, start in enumerate(range(0, q.shape[1], group)):
        part = values[:, start : start + group]
        absmax = np.abs(part).max(axis=1, keepdims=True)
        rounded = np.rint(part * (f32(127) / absmax))
        share = exact_product(rounded, q[:, start : start + group]).astype(f32) * scales[:, g].float().numpy()
        share = share - minima[:, g].float().numpy() * rounded.sum(axis=1, keepdims=True).astype(f32)
        out = out + share * (absmax / f32(127))
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "group"), GROUPED)
@pytest.mark.parametrize("bits", [*FEWER, 8])
def test_minima(isa, bits, outputs, inputs, group, dtype):
    group = max(group, 32) if bits == 3 else group
    levels = torch.randint(0, 1 << min(bits, 4), (outputs, inputs), dtype=torch.uint8)
    scales, minima = (torch.randn(outputs, inputs // group).to(dtype) for _ in range(2))
    stored = stored_of(levels, bits)
    if bits == 8:
        levels = stored = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    packed = pack(bits, stored, scales, minima=minima)
    assert torch.equal(unpack(packed), stored) and torch.equal(stored_by_group(packed, "minima"), minima)
    linear = IntegerLinear([packed], [None])
    for rows in (1, 2, 3, 4, 7, 49, 100):
        x = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
        np.testing.assert_array_equal(linear(x).numpy(), oracle_with_minima(x, levels, scales, minima))


@pytest.mark.parametrize("bits", [8, *FEWER])
def test_rows_may_lie_apart_and_their_numbers_too(bits):
    packed, *_ = make(bits, 70, 256, 128)
    linear, x = IntegerLinear([packed], [None]), torch.randn(7, 256)
    expected = linear(x)
    for other in (x.t().contiguous().t(), torch.cat((x, x), dim=1)[:, :256]):
        assert torch.equal(linear(other), expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("bits", "group"), [(8, 128), (4, 32), (4, 128), (3, 32), (2, 128)])
def test_a_row_does_not_depend_on_the_others(isa, bits, group, threads):
    packed, *_ = make(bits, 150, 256, group)
    linear = IntegerLinear([packed], [torch.randn(150)])
    x = torch.randn(64, 256).bfloat16()
    alone = torch.cat([linear(row) for row in x.split(1)])
    torch.set_num_threads(threads)
    try:
        for rows in range(1, 65):
            assert torch.equal(linear(x[:rows]), alone[:rows])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("bits", [8, *FEWER])
def test_saturating_instructions_would_be_wrong_here(isa, bits):
    largest = (1 << bits - 1) - 1
    integers = torch.full((64, 128), -largest, dtype=torch.int8)
    integers[:, ::2] = largest
    stored = integers if bits == 8 else stored_of((integers + largest + 1).view(torch.uint8), bits)
    packed = pack(bits, stored, torch.ones(64, 1))
    x = torch.where(torch.arange(128) % 2 == 0, 127.0, -127.0).expand(9, -1)
    for rows in (1, 4, 8, 9):
        assert IntegerLinear([packed], [None])(x[:rows]).tolist() == [[127.0 * largest * 128] * 64] * rows


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [8, *FEWER])
def test_what_is_not_finite_makes_its_row_nan(isa, bits, value):
    packed, *_ = make(bits, 70, 256, 64)
    linear = IntegerLinear([packed], [None])
    x = torch.randn(9, 256)
    expected = linear(x)
    x[4, 200] = value
    got = linear(x)
    assert got[4].isnan().all()
    rest = torch.arange(9) != 4
    assert torch.equal(got[rest], expected[rest])


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-36, 1e-34, 1e30])
def test_extreme_magnitudes(isa, scale):
    packed, integers, scales = make(8, 70, 256, 128)
    x = torch.randn(3, 256) * scale
    got = IntegerLinear([packed], [None])(x)
    np.testing.assert_array_equal(got.numpy(), oracle(x, integers, scales, bits=8, group=128))
    assert got.isfinite().all()


def test_an_outlier_channel_spoils_one_group_only(isa):
    packed, integers, scales = make(8, 64, 1024, 128)
    x = torch.randn(1, 1024)
    x[0, 0] = 1000
    exact = x.double().numpy() @ (integers * scales).T
    error = np.abs(IntegerLinear([packed], [None])(x).numpy() - exact).max()
    rows = torch.round(x / x.abs().max() * 127) * x.abs().max() / 127  # one scale for the whole row
    assert error < 0.6 * np.abs(rows.double().numpy() @ (integers * scales).T - exact).max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, *FEWER])
def test_dtypes_bias_and_views(isa, bits, dtype):
    packed, *_ = make(bits, 90, 128, 64, dtype=dtype)
    bias = torch.randn(90).to(dtype)
    wide = torch.randn(7, 300).to(dtype)
    x = wide[:, 1:129]  # rows one stride apart, not aligned
    plain = IntegerLinear([packed], [None])(x.float())
    got = IntegerLinear([packed], [bias])(x)
    assert got.dtype == dtype
    assert torch.equal(got, (plain + bias.float()).to(dtype))


@pytest.mark.parametrize("bits", [8, *FEWER])
def test_weights_that_share_their_input_as_each_alone(isa, bits):
    weights = [make(bits, outputs, 128, 32)[0] for outputs in (64, 3, 130)]
    biases = [None, torch.randn(3), None]
    x = torch.randn(10, 128).bfloat16()
    together = IntegerLinear(weights, biases)(x)
    alone = [IntegerLinear([w], [b])(x) for w, b in zip(weights, biases, strict=True)]
    assert torch.equal(together, torch.cat(alone, dim=1))


@pytest.mark.parametrize("epilogue", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bits", [8, *FEWER])
def test_epilogues(isa, bits, epilogue):
    gate, up = (make(bits, 70, 128, 32)[0] for _ in range(2))
    biases = [torch.randn(70), torch.randn(70)]
    x = torch.randn(5, 128)
    g, u = (IntegerLinear([w], [b])(x) for w, b in zip((gate, up), biases, strict=True))
    act = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
    }[epilogue]
    got = IntegerLinear([gate, up], biases, epilogue=epilogue)(x)
    torch.testing.assert_close(got, act(g) * u, rtol=2e-6, atol=2e-6 * float((g * u).abs().max()))


def test_no_rows(isa):
    packed, *_ = make(8, 70, 256, 128)
    assert IntegerLinear([packed], [None])(torch.empty(0, 256)).shape == (0, 70)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("bits", "outputs", "inputs", "group"),
    [
        *((8, *shape[1:3], None) for shape in SHAPES if shape[0] == 8),
        *((8, *shape[1:]) for shape in SHAPES if shape[0] == 4),
        *SHAPES[5:],
    ],
)
def test_quantize_and_pack_in_one_as_round_to_nearest(isa, bits, outputs, inputs, group, dtype):
    weight = torch.randn(outputs, inputs + 8).to(dtype)[:, :inputs]  # rows lie apart
    weight[0, 0] = 0
    expected = rtn.quantize(weight, WeightConfig(bits=bits, group_size=group))
    result = quantize(bits, weight, group or inputs)
    assert result is not None
    packed, scales = result
    assert torch.equal(scales, expected.weight_scale)
    stored = unpack(packed)
    assert torch.equal(stored, expected.weight if bits == 8 else expected.weight_packed.view(torch.uint8))
    assert torch.equal(stored_scales(packed, dtype), expected.weight_scale)
    again = pack(bits, stored, scales)
    assert torch.equal(again.packed, packed.packed)
    assert torch.equal(again.scales, packed.scales)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("bits", "symmetric"), [(8, True), (4, True), (4, False), (3, False), (2, True)])
def test_a_weight_that_is_not_finite_is_told(isa, bits, symmetric, value):
    weight = torch.randn(70, 64)
    weight[69, 63] = value
    assert quantize(bits, weight, 32, symmetric=symmetric) is None


@pytest.mark.parametrize("bits", FEWER)
def test_zeros_have_scale_zero(isa, bits):
    result = quantize(bits, torch.zeros(3, 64), 32)
    assert result is not None
    assert torch.equal(result[1], torch.zeros(3, 2))
    assert torch.equal(IntegerLinear([result[0]], [None])(torch.randn(2, 64)), torch.zeros(2, 3))


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_packed_weights_know_their_activation_group():
    assert make(8, 3, 256, 32)[0].activation_group == 128
    assert make(4, 3, 256, 32)[0].activation_group == 32
    assert isinstance(make(4, 3, 256, 32)[0], PackedWeight)


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_symmetric_weights_hold_no_zero_points():
    assert make(4, 3, 64, 32)[0].zeros is None
    assert stored_by_group(make(8, 3, 64, 32)[0], "zeros") is None
