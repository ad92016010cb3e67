from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_accel.config import WeightConfig
from hf_accel.errors import UnsupportedError
from hf_accel.linear import Float8Weight, quantize
from hf_accel.linear.methods.rtn import quantize_like

FP8 = WeightConfig(format="fp8")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("row", "integers", "scale"),
    [
        ([0.42, -0.81, 0.05, 0.37, -0.12], [66, -127, 8, 58, -19], 0.81 / 127),
        ([0.5, -0.2, 0.0, -1.0], [64, -25, 0, -127], 1 / 127),  # 63.5 rounds half to even
        ([127.0, 0.5, 1.5, 2.5, -0.5, -1.5], [127, 0, 2, 2, 0, -2], 1.0),
        ([0.0, 0.0], [0, 0], 0.0),
    ],
)
def test_worked_numbers_in_int8(row, integers, scale):
    weight = quantize(torch.tensor([row]), WeightConfig())
    assert weight.integers().tolist() == [integers]
    assert weight.weight_scale.item() == pytest.approx(scale, rel=1e-6)
    assert (weight.dequantize(torch.float32) - torch.tensor([row])).abs().max() <= scale / 2 * 1.0001
    assert weight.integers().nbytes == len(row)
    assert not weight.dequantize(torch.float32).isnan().any()


def test_worked_numbers_in_int4():
    row = torch.zeros(1, 64)
    row[0, :4] = torch.tensor([8.0, -7.0, 2.5, -0.5])  # scale -1: the largest is positive
    row[0, 32:36] = torch.tensor([-16.0, 3.0, 5.0, 16.0])  # scale 2: of two as large, the negative one is kept whole
    weight = quantize(row, WeightConfig(bits=4, group_size=32))
    assert weight.weight_scale.tolist() == [[-1.0, 2.0]]
    assert weight.integers()[0, :4].tolist() == [-8, 7, -2, 0]
    assert weight.integers()[0, 32:36].tolist() == [-8, 2, 2, 7]
    zero = quantize(torch.zeros(1, 32), WeightConfig(bits=4, group_size=32)).weight_scale
    assert zero.tolist() == [[0.0]] and not zero.signbit().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "group_size", "level"),
    [(8, 384, 127), (8, 32, 127), (8, 128, 127), (4, 32, -8), (4, 64, -8), (4, 128, -8), (3, 32, -4), (2, 128, -2)],
)
def test_every_number_is_within_half_a_stored_scale(dtype, bits, group_size, level):
    """level: of the largest magnitude. A number opposite to it is cut off where there is no level for it."""
    dense = torch.randn(300, 384).to(dtype)
    config = WeightConfig(bits=bits, group_size=group_size if group_size < 384 else None)
    weight = quantize(dense, config)
    groups = dense.double().numpy().reshape(300, -1, group_size)
    absmax = np.abs(groups).max(axis=-1)
    scale = weight.weight_scale.double().numpy()
    assert weight.weight_scale.dtype == dtype
    largest = absmax if bits == 8 else np.where(groups.max(axis=-1) > -groups.min(axis=-1), absmax, -absmax)
    np.testing.assert_allclose(scale, largest / level, rtol=torch.finfo(dtype).eps)
    steps, integers = groups / scale[..., None], weight.integers().double().numpy().reshape(groups.shape)
    cut = np.maximum(steps - (127 if bits == 8 else -level - 1), 0)
    assert (np.abs(steps - integers) <= np.maximum(0.5, cut) * (1 + 1e-6)).all()
    assert (cut <= 1 + 2 * -level * torch.finfo(dtype).eps).all() if bits < 8 else not (cut > 0.5).any()


def test_worked_numbers_in_asymmetric_int4():
    row = torch.zeros(1, 96)
    row[0, :4] = torch.tensor([10.0, -5.0, 2.5, 3.5])  # scale 1, zero 5; half to even before the zero point is added
    row[0, 32:64] = torch.linspace(30, 60, 32)  # scale 4: the range holds 0
    row[0, 64:66] = torch.tensor([-7.5, -3.0])  # scale 0.5, zero 15
    weight = quantize(row, WeightConfig(bits=4, group_size=32, symmetric=False))
    assert weight.weight_scale.tolist() == [[1.0, 4.0, 0.5]]
    assert weight.zero_points().tolist() == [[5 - 8, -8, 7]]
    assert (weight.integers()[0, :5] + 8).tolist() == [15, 0, 7, 9, 5]
    assert (weight.integers()[0, 64:67] + 8).tolist() == [0, 9, 15]
    assert weight.dequantize(torch.float32)[0, [0, 1, 4, 63, 64, 65, 95]].tolist() == [10, -5, 0, 60, -7.5, -3, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("shift", [-3.0, -0.5, 0.0, 0.7, 5.0])
@pytest.mark.parametrize(("bits", "steps"), [(4, 15), (3, 7), (2, 3)])
def test_asymmetric_is_within_half_a_stored_step(dtype, group_size, shift, bits, steps):
    dense = (torch.randn(300, 384) + shift).to(dtype)
    weight = quantize(dense, WeightConfig(bits=bits, group_size=group_size, symmetric=False))
    groups = dense.double().numpy().reshape(300, -1, group_size)
    span = np.maximum(groups.max(axis=-1), 0) - np.minimum(groups.min(axis=-1), 0)
    scale = weight.weight_scale.double().numpy()
    eps = torch.finfo(dtype).eps
    assert weight.weight_scale.dtype == dtype
    np.testing.assert_allclose(scale, span / steps, rtol=eps)
    zeros = weight.zero_points().double().numpy()[..., None]
    integers = weight.integers().double().numpy().reshape(groups.shape)
    error = np.abs(groups - (integers - zeros) * scale[..., None])
    lost = np.maximum(span - steps * scale, 0)  # what rounding the scale took off the range
    assert (error <= (0.5 * scale + lost)[..., None] * (1 + 1e-6)).all()
    assert (lost <= steps * scale * eps).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_asymmetric_is_better_on_one_sided_groups(sign):
    dense = sign * torch.rand(64, 256)
    errors = [
        (quantize(dense, WeightConfig(bits=4, group_size=32, symmetric=s)).dequantize(torch.float32) - dense).norm()
        for s in (True, False)
    ]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_asymmetric_extremes_stay_finite(dtype):
    largest = torch.finfo(dtype).max
    dense = torch.zeros(4, 32, dtype=dtype)
    dense[0, 0], dense[0, 1] = largest, -largest
    dense[1] = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # its step is too small to store
    weight = quantize(dense, WeightConfig(bits=4, group_size=32, symmetric=False))
    assert weight.weight_scale.isfinite().all()
    assert weight.weight_scale.tolist()[1:] == [[0.0]] * 3
    assert not weight.dequantize(torch.float32)[1:].any()
    assert weight.dequantize(torch.float32)[0, 2:].tolist() == [0.0] * 30  # zeros stay zeros


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_the_divisor_is_the_scale_as_stored(dtype, bits):
    dense = torch.randn(17, 128).to(dtype)
    weight = quantize(dense, WeightConfig(bits=bits))
    scale = weight.weight_scale.float().numpy()
    low, high = (-127, 127) if bits == 8 else (-(1 << bits - 1), (1 << bits - 1) - 1)
    expected = np.clip(np.rint(dense.float().numpy() / scale), low, high)
    np.testing.assert_array_equal(weight.integers().numpy(), expected)


def test_a_scale_too_small_to_store_makes_zeros():
    weight = quantize(torch.tensor([[1e-7, 0.0, -1e-7]], dtype=torch.float16), WeightConfig())
    assert weight.weight_scale.tolist() == [[0.0]]
    assert weight.integers().tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_the_nearest_of_all_its_numbers(dtype):
    dense = torch.randn(300, 64).mul(torch.logspace(-4, 1, 300).unsqueeze(1)).to(dtype)
    dense[7], dense[8, 3] = 0, 10 * dense[8].abs().max()
    weight = quantize(dense, FP8)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    codes = codes[codes.isfinite()]
    assert codes.abs().max() == 448
    scale = weight.weight_scale.double()
    assert torch.equal(weight.weight_scale, (dense.float().abs().amax(1, keepdim=True) / 448).to(dtype))
    wanted = (dense.double() / scale.masked_fill(scale == 0, 1)).clamp(-448, 448)
    error = (weight.integers().double() - wanted).abs()
    least = (wanted.unsqueeze(-1) - codes).abs().amin(-1)
    assert (error <= least * (1 + 1e-5) + 1e-6).all()  # a tie may go either way where float32 rounds the quotient
    assert torch.equal(weight.dequantize(torch.float64), weight.integers().double() * scale)
    for value in (math.nan, math.inf):
        with pytest.raises(UnsupportedError, match="the weight holds NaN or infinity"):
            quantize(dense.index_fill(0, torch.tensor([299]), value), FP8)


def test_fp8_goes_in_again_unchanged_and_in_groups():
    once = quantize(torch.randn(9, 64), FP8)
    twice = quantize(once.dequantize(torch.float32), FP8)
    assert torch.equal(once.integers().float(), twice.integers().float())
    grouped = Float8Weight(once.weight, torch.rand(9, 2) + 0.5)
    again = quantize_like(grouped.dequantize(torch.float32), grouped)
    assert (again.format, again.group_size) == ("fp8", 32)
    assert (again.dequantize(torch.float32) - grouped.dequantize(torch.float32)).abs().max() < 0.04 * 448 * 1.5


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_what_came_out_goes_in_again_unchanged(bits):
    config = WeightConfig(bits=bits, group_size=32)
    once = quantize(torch.randn(9, 64), config)
    twice = quantize(once.dequantize(torch.float32), config)
    assert torch.equal(once.integers(), twice.integers())


@pytest.mark.parametrize(("bits", "symmetric"), [(8, True), (4, True), (4, False), (3, True), (2, False)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(bits, symmetric, value):
    dense = torch.randn(300, 128)
    dense[299, 3] = value
    with pytest.raises(UnsupportedError, match="the weight holds NaN or infinity; repair the checkpoint or skip"):
        quantize(dense, WeightConfig(bits=bits, symmetric=symmetric))


def test_a_group_that_does_not_divide_is_refused():
    with pytest.raises(UnsupportedError, match=r"group_size=128 .* \[3, 96\]; use group_size=32"):
        quantize(torch.randn(3, 96), WeightConfig(bits=4))


@pytest.mark.parametrize(("bits", "symmetric"), [(8, True), (4, True), (4, False), (3, True), (2, False)])
def test_a_transposed_parameter_is_read_and_not_written(bits, symmetric):
    stored = torch.nn.Parameter(torch.randn(128, 6))
    before = stored.detach().clone()
    got = quantize(stored.t(), WeightConfig(bits=bits, symmetric=symmetric))
    expected = quantize(before.t().contiguous(), WeightConfig(bits=bits, symmetric=symmetric))
    assert torch.equal(got.integers(), expected.integers())
    assert got.integers().is_contiguous()
    assert not got.weight_scale.requires_grad
    assert torch.equal(stored, before)
