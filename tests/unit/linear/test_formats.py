from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_accel.errors import UnsupportedError
from hf_accel.linear import Int4Weight, Int8Weight
from hf_accel.linear.formats import (
    KINDS,
    Layout,
    check_group_size,
    chunks,
    from_state,
    state,
    zero_point_bytes,
    zeros,
)  # fmt: skip
from hf_accel.linear.formats.quantized_weight import CHUNK
from hf_accel.linear.methods.rtn import quantize_like


@pytest.mark.parametrize(
    ("integers", "words"),
    [
        (list(range(-8, 8)), [0x76543210, 0xFEDCBA98 - 2**32]),  # compressed-tensors' own packing
        ([-8, 0, 0, 0, 0, 0, 0, 0], [0x88888880 - 2**32]),
        ([0, 0, 0, 0, 0, 0, 0, 7], [0xF8888888 - 2**32]),
        ([1, 2, 3, 4, 5, 6, 7, -1], [0x7FEDCBA9]),
    ],
)
def test_int4_words_are_those_of_compressed_tensors(integers, words):
    weight = Int4Weight.from_integers(torch.tensor([integers], dtype=torch.int8), torch.ones(1, 1))
    assert weight.weight_packed.dtype == torch.int32
    assert weight.weight_packed.tolist() == [words]
    assert weight.integers().tolist() == [integers]
    assert weight.weight_shape.tolist() == [1, len(integers)]
    assert weight.weight_shape.dtype == torch.int64


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ([-8, -1, 0, 7], [0xF870]),  # compressed-tensors' own packing, a word padded with zeros
        ([1, 2, 3, 4, 5, 6, 7, -1], [0x7FEDCBA9]),
        ([0] * 8 + [-7], [0x88888888 - 2**32, 1]),
    ],
)
def test_zero_points_are_packed_along_the_outputs(column, words):
    zero_point = torch.tensor(column, dtype=torch.int8)
    zero_point = torch.stack((zero_point, torch.full_like(zero_point, -8), zero_point.flip(0)), dim=1)
    integers = torch.zeros(len(column), 24, dtype=torch.int8)
    weight = Int4Weight.from_integers(integers, torch.ones(len(column), 3), zero_point)
    assert weight.weight_zero_point.dtype == torch.int32
    assert weight.weight_zero_point.is_contiguous()
    assert weight.weight_zero_point[:, :2].tolist() == [[word, 0] for word in words]
    assert torch.equal(weight.zero_points(), zero_point)
    single = Int4Weight.from_integers(integers[:, :8], torch.ones(len(column), 1), zero_point[:, :1])
    assert single.weight_zero_point.tolist() == [[word] for word in words]


@pytest.mark.parametrize(
    "outputs", [slice(None), slice(0, 7), slice(9, 21), slice(30, 35), slice(3, 34, 5), slice(8, 8)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_zero_points_are_taken_off(outputs, dtype, bits):
    half = 1 << bits - 1
    integers = torch.randint(-half, half, (35, 96), dtype=torch.int8)
    zero_point = torch.randint(-half, half, (35, 3), dtype=torch.int8)
    scale = torch.rand(35, 3).to(dtype)
    weight = KINDS[f"int{bits}"].from_integers(integers, scale, zero_point)
    assert weight.weight_zero_point.nbytes == zero_point_bytes(35, 3, bits)
    assert torch.equal(weight.zero_points(outputs), zero_point[outputs])
    exact = integers.double().view(35, 3, 32) - zero_point.double()[..., None]
    expected = (exact * scale.double()[..., None]).flatten(1).to(dtype)[outputs]
    assert torch.equal(weight.dequantize(dtype, outputs=outputs), expected)
    assert torch.equal(weight.integers(outputs), integers[outputs])


def test_a_state_has_zero_points_only_where_the_weight_has():
    integers, scale = torch.zeros(3, 32, dtype=torch.int8), torch.ones(3, 1)
    symmetric = Int4Weight.from_integers(integers, scale)
    assert symmetric.symmetric
    assert symmetric.zero_points() is None
    assert list(state(symmetric)) == ["weight_packed", "weight_scale", "weight_shape"]
    assert from_state(Int4Weight, state(symmetric)).symmetric
    asymmetric = Int4Weight.from_integers(integers, scale, torch.tensor([[3], [-8], [7]], dtype=torch.int8))
    assert not asymmetric.symmetric
    assert list(state(asymmetric)) == ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"]
    assert from_state(Int4Weight, state(asymmetric)).zero_points().tolist() == [[3], [-8], [7]]


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_the_first_integer_is_in_the_lowest_bits(bits):
    half = 1 << bits - 1
    integers = torch.randint(-half, half, (5, 64), dtype=torch.int8)
    weight = KINDS[f"int{bits}"].from_integers(integers, torch.ones(5, 2))
    assert weight.weight_packed.dtype == torch.int32
    assert weight.weight_packed.shape == (5, 2 * bits)
    for words, row in zip(weight.weight_packed.tolist(), integers.tolist(), strict=True):
        stored = sum((word % 2**32) << 32 * place for place, word in enumerate(words))
        assert stored == sum((q + half) << bits * place for place, q in enumerate(row))


@pytest.mark.parametrize(
    ("bits", "shape"),
    [
        (8, (1, 1)),
        (8, (3, 33)),
        (8, (64, 37)),
        (4, (1, 32)),
        (4, (33, 96)),
        (3, (1, 32)),
        (3, (33, 96)),
        (2, (5, 160)),
    ],
)
def test_integers_survive_storage(make_weight, bits, shape):
    half = 1 << bits - 1
    low, high = (-127, 128) if bits == 8 else (-half, half)
    integers = torch.randint(low, high, shape, dtype=torch.int8)
    weight = KINDS[f"int{bits}"].from_integers(integers, torch.ones(shape[0], 1))
    assert weight.shape == shape
    assert torch.equal(weight.integers(), integers)
    restored = from_state(type(weight), state(weight) | {"bias": torch.zeros(1)})
    assert torch.equal(restored.integers(slice(1, None)), integers[1:])


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, 32), (4, 64), (4, 128), (3, 32), (2, 128)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_rounds_the_exact_product_once(make_weight, bits, group_size, scale_dtype, dtype):
    weight, dense = make_weight(bits, 5, 256, group_size=group_size, dtype=scale_dtype)
    got = weight.dequantize(dtype, outputs=slice(1, 4))
    expected = torch.from_numpy(dense)[1:4].to(dtype)
    if scale_dtype == torch.float32 and dtype.itemsize == 2:  # the product is rounded to float32 on the way
        torch.testing.assert_close(got, expected, rtol=torch.finfo(dtype).eps, atol=0)
    else:
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("outputs", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_chunks_cover_every_output_once(outputs):
    covered = [index for piece in chunks(outputs) for index in range(outputs)[piece]]
    assert covered == list(range(outputs))
    assert max(piece.stop - piece.start for piece in chunks(outputs)) <= CHUNK


@pytest.mark.parametrize(("bits", "shape", "scales"), [(8, (3, 5), (3, 1)), (4, (3, 128), (3, 4))])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_zeros_have_the_stored_shapes(bits, shape, scales, device):
    weight = zeros(Layout(bits=bits, group_size=32 if bits == 4 else None), shape, dtype=torch.bfloat16, device=device)
    assert weight.shape == shape
    assert weight.weight_scale.shape == scales
    assert weight.weight_scale.dtype == torch.bfloat16
    assert {tensor.device.type for tensor in state(weight).values()} == {device}
    if device == "cpu":
        assert not weight.dequantize(torch.float32).any()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_asymmetric_zeros_have_the_stored_shapes(device):
    weight = zeros(Layout(bits=4, group_size=32, symmetric=False), (11, 128), dtype=torch.bfloat16, device=device)
    assert {name: (t.dtype, tuple(t.shape), t.device.type) for name, t in state(weight).items()} == {
        "weight_packed": (torch.int32, (11, 16), device),
        "weight_scale": (torch.bfloat16, (11, 4), device),
        "weight_shape": (torch.int64, (2,), device),
        "weight_zero_point": (torch.int32, (2, 4), device),
    }
    assert zero_point_bytes(11, 4) == weight.weight_zero_point.nbytes


@pytest.mark.parametrize(
    ("inputs", "group_size", "message"),
    [
        (96, 64, r"group_size=64 does not divide the 96 inputs of a weight \[7, 96\]; use group_size=32$"),
        (192, 128, r"the 192 inputs .* use group_size=64$"),
        (33, 32, r"the 33 inputs .* use bits=8 for it, or skip it$"),
    ],
)
def test_a_group_that_does_not_divide_is_refused(inputs, group_size, message):
    with pytest.raises(UnsupportedError, match=message):
        check_group_size((7, inputs), group_size)


def test_groups_in_a_row_are_counted():
    assert check_group_size((7, 384), 128) == 3


def made(bits: int, *, minima: bool = False, ordered: bool = False):
    """A weight [10, 64] that another program might have made, and what it is in float64."""
    integers = torch.randint(-8 if bits == 4 else -128, 8 if bits == 4 else 128, (10, 64), dtype=torch.int8)
    scale = torch.randn(10, 4).half()
    order = torch.randperm(64).to(torch.int32) if ordered else None
    columns = integers.double() * scale.double().repeat_interleave(16, 1)
    minimum = torch.randn(10, 4).half() if minima else None
    if bits == 8:
        weight = Int8Weight(integers, scale, order, minimum)
        if minimum is not None:
            columns -= minimum.double().repeat_interleave(16, 1)
    else:
        weight = replace(Int4Weight.from_integers(integers, scale), weight_minimum=minimum, input_order=order)
        if minimum is not None:
            columns += (8 * scale.double() - minimum.double()).repeat_interleave(16, 1)
    dense = torch.empty(10, 64, dtype=torch.float64)
    for column in range(64):
        dense[:, int(order[column]) if order is not None else column] = columns[:, column]
    return weight, dense


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("bits", "minima"), [(8, False), (8, True), (4, False), (4, True)])
def test_groups_minima_and_orders_of_inputs(bits, minima, ordered):
    weight, dense = made(bits, minima=minima, ordered=ordered)
    torch.testing.assert_close(weight.dequantize(torch.float64), dense, rtol=1e-12, atol=1e-12)
    assert torch.equal(weight.dequantize(torch.float32, outputs=slice(3, 7)), weight.dequantize(torch.float32)[3:7])
    layout = weight.layout
    groups = {"bits": bits, "group_size": 16, "scale_dtype": weight.weight_scale.dtype}
    assert layout == Layout(**groups, symmetric=not minima, minima=minima, ordered=ordered)
    again = from_state(type(weight), state(weight))
    assert torch.equal(again.dequantize(torch.float32), weight.dequantize(torch.float32))
    empty = zeros(layout, (10, 64), dtype=torch.float16, device="cpu")
    assert {k: (t.dtype, t.shape) for k, t in state(empty).items()} == {
        k: (t.dtype, t.shape) for k, t in state(weight).items()
    }


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("bits", "symmetric"), [(8, True), (4, True), (4, False)])
def test_requantized_in_the_same_format(bits, symmetric, ordered):
    weight, _ = made(bits, minima=not symmetric, ordered=ordered)
    dense = torch.randn(10, 64)
    again = quantize_like(dense, weight)
    assert (again.bits, again.group_size, again.symmetric) == (bits, 16, symmetric)
    assert again.weight_scale.dtype is torch.float16 and (again.input_order is not None) is ordered
    step = again.weight_scale.float().abs()
    steps = torch.empty(10, 64).index_copy_(
        1, torch.arange(64) if weight.input_order is None else weight.input_order.long(), step.repeat_interleave(16, 1)
    )
    cut = dense.abs() / steps - 7 if (bits, symmetric) == (4, True) else torch.zeros(())  # opposite to the largest
    assert ((again.dequantize(torch.float32) - dense).abs() <= cut.clamp(min=0.52) * steps + 1e-3).all()
