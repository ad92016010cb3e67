"""The native kernels that write pages: the bits of the torch path, on every instruction set and by Triton."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hf_accel.cache.quantized import INT4, QUANTIZED, PageDtypes, rotate
from hf_accel.cache.storage import KVStorage
from hf_accel.errors import UnsupportedError
from hf_accel.hardware import possible_levels
from hf_accel.hardware.device import instruction_sets
from hf_accel.kernels import cpu as kernels
from hf_accel.kernels import triton

from ...devices import triton_device

LEVELS = possible_levels(instruction_sets())
TRITON = pytest.param("triton", marks=pytest.mark.gpu)

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))


@pytest.fixture(params=[*LEVELS, TRITON])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Who writes: the C++ kernel of an instruction set, or the Triton kernel."""
    if request.param == "triton":
        reason = triton.refusal(triton_device())
        if reason is not None:
            pytest.skip(reason)
        yield request.param
        return
    if triton.is_interpreted():
        pytest.skip("Triton's interpreter takes the place of the C++ kernel")
    try:
        with kernels.using_isa(request.param):
            yield request.param
    except UnsupportedError as error:  # this compiler does not know the level
        pytest.skip(str(error))


def written(
    keys: Tensor, values: Tensor, slots: Tensor, *, quantized: PageDtypes | None, native: bool
) -> dict[str, Tensor]:
    """What all of the pages hold afterwards; zero where nothing was written."""
    device = triton_device() if native else "cpu"
    keys, values, slots = keys.to(device), values.to(device), slots.to(device)
    storage = KVStorage(9, 4, keys, values, quantized=quantized)
    pages = {name: tensor for name, tensor in storage.pages._asdict().items() if tensor is not None}
    for tensor in pages.values():
        tensor.view(torch.uint8).zero_()
    if not native:
        storage._native_write = lambda *_: None  # type: ignore[method-assign]
    storage.write(keys, values, slots)
    return {name: tensor.cpu() for name, tensor in pages.items()}


def assert_same(keys: Tensor, values: Tensor, quantized: PageDtypes | None) -> None:
    slots = torch.randperm(36, generator=torch.Generator().manual_seed(0))[: len(keys)]
    expected = written(keys, values, slots, quantized=quantized, native=False)
    for name, actual in written(keys, values, slots, quantized=quantized, native=True).items():
        if actual.dtype.itemsize == 1:  # levels are never NaN
            actual, expected[name] = actual.view(torch.uint8), expected[name].view(torch.uint8)
        assert torch.equal(actual.isnan(), expected[name].isnan())
        assert torch.equal(actual.nan_to_num(0), expected[name].nan_to_num(0)), name


@pytest.mark.parametrize("quantized", [None, *QUANTIZED.values()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bits_of_the_torch_path(isa: str, dtype: torch.dtype, quantized: PageDtypes | None) -> None:
    generator = torch.Generator().manual_seed(1)
    odd = [(33, 17), (1, 100)] if INT4 not in (quantized or ()) else [(34, 18), (2, 100), (96, 128), (512, 20)]
    tokens = 10 if isa == "triton" and triton.is_interpreted() else 35  # the interpreter is slow
    for dims in ((64, 64), (8, 6), *odd):
        keys, values = (torch.randn(tokens, 3, dim, generator=generator) for dim in dims)
        sizes = torch.logspace(-9, 4.5, tokens).view(-1, 1, 1)  # denormal in float16, and near its largest
        assert_same((keys * sizes).clamp(-6e4, 6e4).to(dtype), values.to(dtype), quantized)


@pytest.mark.parametrize("quantized", [None, *QUANTIZED.values()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_that_are_none(isa: str, dtype: torch.dtype, quantized: PageDtypes | None) -> None:
    keys, values = torch.randn(8, 2, 20), torch.zeros(8, 2, 24)
    for token, number in enumerate([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3e38, 0.0]):
        keys[token, 0, token] = number
    keys[6, 0, 1:3] = torch.tensor([float("inf"), float("nan")])
    keys[7] = 0
    assert_same(keys.to(dtype), values.to(dtype), quantized)


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-5, 1e-7])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("quantized", [QUANTIZED["int8"], QUANTIZED["int4"]], ids=str)
def test_small_numbers_in_half_precision_keep_their_levels(quantized: PageDtypes, size: float, native: bool) -> None:
    """A scale in half precision would be subnormal, and wrong by several percent."""
    if native and kernels.refusal():
        pytest.skip(kernels.refusal())
    keys = (torch.randn(35, 3, 64) * size).half()
    slots = torch.arange(35)
    storage = KVStorage(9, 4, keys, keys, quantized=quantized)
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(KVStorage, "_native_write", lambda *_: None)
        storage.write(keys, keys, slots)
    error, numbers = storage.read(slots)[0].float() - keys.float(), keys.float()
    if INT4 in quantized:
        error, numbers = rotate(error), rotate(numbers)
    steps = numbers.abs().amax(-1, keepdim=True) / 127
    if INT4 in quantized:
        steps = (numbers.amax(-1, keepdim=True) - numbers.amin(-1, keepdim=True)) / 15
    # of what is read back, in half precision; a rotation adds up those of all numbers of a head
    rounding = (keys.float().abs().amax(-1, keepdim=True) + steps) * 2.0**-11 + 2.0**-25
    assert (error.abs() <= 0.501 * steps + rounding * (8 if INT4 in quantized else 1)).all()


def test_ties_round_to_even(isa: str) -> None:
    levels = torch.arange(-127, 128) / 2  # halves, and a largest of 127 that makes the scale 1
    keys = torch.cat([levels, torch.tensor([127.0])]).view(1, 1, -1)
    assert_same(keys, keys, QUANTIZED["int8"])
    finer = torch.cat([torch.linspace(-448, 448, 3585), torch.linspace(-0.02, 0.02, 2049)]).view(1, 1, -1)
    assert_same(finer, finer, QUANTIZED["fp8"])


@pytest.mark.parametrize("quantized", [None, QUANTIZED["int8"], QUANTIZED["int8-int4"]], ids=str)
def test_strided_views_and_no_tokens(quantized: PageDtypes | None) -> None:
    wide = torch.randn(2, 12, 5, 40)  # [B, H, Q, ...], as transformers hands it over
    keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (wide[:, :4, :, 3:19], wide[:, 4:8, :, 20:28]))
    assert_same(keys, values, quantized)
    assert_same(wide[0].transpose(0, 1)[:, :3, ::2], wide[0].transpose(0, 1)[:, 5:8, :6], quantized)
    assert_same(keys[:0], values[:0], quantized)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same(torch.randn(36, 4, 64).bfloat16(), torch.randn(36, 4, 64).bfloat16(), QUANTIZED["int8"])
        assert_same(torch.randn(36, 4, 64).bfloat16(), torch.randn(36, 4, 64).bfloat16(), QUANTIZED["int8-int4"])
    finally:
        torch.set_num_threads(before)
