"""The Triton kernels of norms, rotations, writes and gates: against torch in float32, and compiled for every GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accel.cache.quantized import INT4, PageDtypes, rotate
from hf_accel.cache.storage import KVStorage
from hf_accel.kernels import triton as kernels
from tests.devices import triton_device

from .processes import compiled, interpreted

pytest.importorskip("triton")
from hf_accel.kernels.triton import layer_parts as module
from hf_accel.kernels.triton.kv_write import (
    rope_and_write,
    rotated_heads,
    rotating,
    rotating_and_writing,
    write_pages,
    writing,
)

runs = pytest.mark.skipif(kernels.refusal(triton_device()) is not None, reason=str(kernels.refusal(triton_device())))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [FP32, BF16, FP16]
LONG = pytest.mark.long
TRIED = [pytest.param(FP32, marks=LONG), BF16, pytest.param(FP16, marks=LONG)]
PAIRS = [(BF16, BF16), (BF16, FP32), pytest.param((FP32, FP32), marks=LONG), pytest.param((FP16, FP16), marks=LONG)]
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def on(x: Tensor) -> Tensor:
    return x.to(triton_device())


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype is expected.dtype
    tolerance = 1e-6 if got.dtype is FP32 else 2 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def normed(x: Tensor, weight: Tensor, eps: float, *, offset: float, round_first: bool) -> Tensor:
    wide = x.double()
    wide = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    if round_first:
        return weight * wide.to(x.dtype)
    return (wide * (offset + weight.double())).to(x.dtype)


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize(("offset", "round_first"), [(0.0, True), (0.0, False), (1.0, False)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 48), pytest.param((2, 3, 128), marks=LONG), (2, 1000), (0, 8)])
def test_norm(shape, offset, round_first, dtypes):
    for magnitude in (1e-3, 1.0, 300.0):
        x, weight = on(torch.randn(shape) * magnitude).to(dtypes[0]), on(torch.randn(shape[-1])).to(dtypes[1])
        got = module.rms_norm(x, weight, 1e-5, offset=offset, round_first=round_first)
        assert_close(got, normed(x, weight, 1e-5, offset=offset, round_first=round_first))


@runs
@pytest.mark.gpu
def test_norm_of_a_view():
    x, weight = on(torch.randn(2, 5, 3, 16)).transpose(1, 2), on(torch.randn(16))
    assert_close(module.rms_norm(x, weight, 1e-6), normed(x, weight, 1e-6, offset=0.0, round_first=True))


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize(("offset", "round_first"), [(0.0, True), (1.0, False)])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 48), pytest.param((2, 1000), marks=LONG), (0, 8)])
def test_sum_and_norm_are_one_after_the_other(shape, offset, round_first, dtypes):
    """To the bit, the sum rounded to its dtype in between; where numbers are not finite too."""
    for magnitude in (1e-3, 300.0, float("inf")):
        x, y = (on(torch.randn(shape) * min(magnitude, 300.0)).to(dtypes[0]) for _ in range(2))
        if magnitude == float("inf") and x.numel():
            x.flatten()[0] = magnitude
        weight = on(torch.randn(shape[-1])).to(dtypes[1])
        total, normed = module.add_rms_norm(x, y, weight, 1e-5, offset=offset, round_first=round_first)
        expected = module.rms_norm(x + y, weight, 1e-5, offset=offset, round_first=round_first)
        assert normed.dtype is expected.dtype and total.dtype is x.dtype
        assert torch.equal(total, x + y)
        assert torch.equal(normed.isnan(), expected.isnan())
        assert torch.equal(normed.nan_to_num(), expected.nan_to_num())


def swapped(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize(("interleaved", "round_each"), list(product([False, True], repeat=2)))
@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "size"),
    [pytest.param(1, (4, 2), 5, 16, marks=LONG), (2, (9, 1), 3, 24), (3, (1, 1), 1, 2)],
)
def test_rotation(batch, heads, tokens, size, interleaved, round_each, dtypes):
    dtype = dtypes[0]
    # As a layer hands them over: of tokens, with heads turned to the front.
    q, k = (on(torch.randn(batch, tokens, count, size)).to(dtype).transpose(1, 2) for count in heads)
    for tables in {1, batch}:
        cos, sin = (on(torch.randn(tables, tokens, size)).to(dtypes[1]) for _ in range(2))
        each = round_each and dtypes[0] is dtypes[1]
        got = module.rope(q, k, cos, sin, interleaved=interleaved, round_each=each)
        for ours, x in zip(got, (q, k), strict=True):
            wide = dtype if each else FP32
            parts = x.to(wide) * cos.to(wide)[:, None], swapped(x, interleaved).to(wide) * sin.to(wide)[:, None]
            expected = (parts[0] + parts[1]).to(dtype)
            assert ours.stride() == x.stride() or 1 in x.shape
            assert dtype is FP32 or torch.equal(ours, expected)
            assert_close(ours, expected)


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [None, INT4, *(pytest.param(d, marks=LONG) for d in EIGHT_BITS)], ids=str)
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "dims", "interleaved"),
    [
        (1, (9, 2), 3, (24, 20), False),
        (2, (2, 2), 2, (16, 16), True),
        pytest.param(1, (4, 1), 5, (96, 64), False, marks=LONG),
    ],
)
def test_rotation_and_write_are_one_after_the_other(batch, heads, tokens, dims, interleaved, dtypes, quantized):
    """To the bit, in pages and in what is returned; a slot below 0 is written nowhere."""
    dtype, each = dtypes[0], dtypes[0] is dtypes[1]
    wide = on(torch.randn(batch, tokens, heads[0] * dims[0] + heads[1] * sum(dims))).to(dtype)  # as one product
    sizes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])]
    parts = wide.split([count * dim for count, dim in sizes], -1)
    q, k, v = (x.view(batch, tokens, *size).transpose(1, 2) for x, size in zip(parts, sizes, strict=True))
    v[0, 0, 0, 0] = float("nan")
    slots = on(torch.tensor([3, -1, 17, 0, 9, 8][: batch * tokens]))
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (k, v)]
    for tables in {1, batch}:
        cos, sin = (on(torch.randn(tables, tokens, dims[0])).to(dtypes[1]) for _ in range(2))
        both, apart = (
            KVStorage(5, 4, *flat, quantized=quantized and PageDtypes(quantized, quantized)).pages for _ in range(2)
        )
        for page in (*both, *apart):
            if page is not None:
                page.view(torch.uint8).zero_()
        options = {"interleaved": interleaved, "round_each": each}
        got = rope_and_write((q, k, v), (cos, sin), both, slots, **options)
        expected = module.rope(q, k, cos, sin, **options)
        write_pages(expected[1].transpose(1, 2).flatten(0, 1), flat[1], apart, slots)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        for a, b in zip(both, apart, strict=True):
            assert (a is b is None) or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        assert both.k.view(torch.uint8).any()


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TRIED, ids=str)
@pytest.mark.parametrize("dim", [2, 80, 96, 128])
def test_turned_as_by_torch(dim, dtype):
    """To the bit, for queries that are part of one product and for results that are not."""
    both = on(torch.randn(3, 5 * dim) * 10).to(dtype)
    for x in (both[:, : 4 * dim].unflatten(1, (4, dim)), both.unflatten(1, (5, dim)), both[:0].unflatten(1, (5, dim))):
        expected = rotate(x.float()).to(dtype)
        assert torch.equal(rotated_heads(x), expected) and rotated_heads(x).is_contiguous()


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TRIED, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate(activation, dtype):
    large = torch.tensor([-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4])
    gate = on(torch.cat((torch.linspace(-12, 12, 1100), large))).to(dtype)[None]
    up = on(2 * torch.rand(gate.shape) - 1).to(dtype)
    exact = gate.double() if dtype is FP32 else gate  # torch's gelu in float32 differs from CPU to CPU, by 1e-6
    expected = (ACTIVATIONS[activation](exact) * up).to(dtype)
    assert_close(module.gated(gate, up, activation=activation), expected)
    both = on(torch.randn(3, 2 * 40)).to(dtype)  # halves of one product
    got = module.gated(both[:, :40], both[:, 40:], activation=activation)
    assert_close(got, ACTIVATIONS[activation](both[:, :40]) * both[:, 40:])


@interpreted
def test_what_is_joined_is_read_once_and_written_once():
    """But for the tables, which each head reads, and the weight, which each row reads."""
    from tests.unit.kernels.triton.bytes_moved import counted

    x, y, weight = (torch.randn(shape).to(BF16) for shape in ((3, 256), (3, 256), (256,)))
    with counted() as moved:
        module.add_rms_norm(x, y, weight, 1e-5)
    assert (moved.loaded, moved.stored) == (2 * x.nbytes + 3 * weight.nbytes, 2 * x.nbytes)
    wide, cos = torch.randn(1, 2, 6 * 64).to(BF16), torch.randn(1, 2, 64).to(BF16)
    q, k, v = (states.unflatten(-1, (2, 64)).transpose(1, 2) for states in wide.split(128, -1))
    pages = KVStorage(2, 4, k.transpose(1, 2)[0], v.transpose(1, 2)[0]).pages
    with counted() as moved:
        rope_and_write((q, k, v), (cos, cos), pages, torch.tensor([1, 5]), interleaved=False, round_each=True)
    tables, slots = 2 * cos.nbytes * 3, 2 * 2 * 8  # for the heads of q together, and for each of K
    assert moved.loaded == wide.nbytes + tables + slots
    assert moved.stored == q.nbytes + 2 * k.nbytes + v.nbytes


# A GPU for each dtype; the others are long.
QUICK = [(FP32, 80), (FP16, 89), (BF16, 90)]


@compiled
@pytest.mark.parametrize(
    ("dtype", "capability"),
    [
        pytest.param(dtype, capability, marks=[] if (dtype, capability) in QUICK else [LONG])
        for dtype in DTYPES
        for capability in (80, 89, 90)
    ],
    ids=str,
)
def test_all_fit_every_gpu(dtype, capability):
    from tests.unit.kernels.triton.compiling import compile_for

    launches = []
    for size in (64, 128, 4096, 5120, module.WIDEST_NORM):
        x, weight = torch.empty(3, size, dtype=dtype), torch.empty(size, dtype=dtype)
        rows = (x, None, None) if size in (64, 5120) else (x, x, x)
        launches.append(module.norm_launch(rows, weight, x, eps=1e-5, offset=0.0, round_first=True))
    for size, interleaved, each in ((16, False, True), (128, True, True), (256, False, False)):
        x, table = torch.empty(2, 8, 5, size, dtype=dtype), torch.empty(1, 5, size, dtype=dtype)
        heads, tables, options = (x, x[:, :3]), (table, table), {"interleaved": interleaved, "round_each": each}
        launches.append(module.rope_launch(heads, heads, tables, **options))
        for quantized in {16: (INT4,), 128: (torch.int8, torch.float8_e4m3fn, None), 256: (None, INT4)}[size]:
            states, slots = torch.empty(10, 3, size, dtype=dtype), torch.zeros(10, dtype=torch.int64)
            pages = KVStorage(2, 16, states, states, quantized=quantized and PageDtypes(quantized, quantized)).pages
            launches.append(rotating_and_writing((*heads, x[:, :3]), tables, pages, slots, **options))
        launches.append(rotating(x[0].transpose(0, 1)))
    launches.append(writing(states, states, pages, slots))
    x = torch.empty(3, 4096, dtype=dtype)
    launches += [module.gate_launch(x, x, x, activation=activation) for activation in ACTIVATIONS]
    for launch in launches:
        compile_for(launch, capability).assert_fits(capability)
