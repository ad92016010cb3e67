from __future__ import annotations

import pytest
import torch

from hf_accel.cache.quantized import INT4, QUANTIZED, PageDtypes, dequantize, quantize, rotate
from hf_accel.cache.storage import KVStorage
from hf_accel.errors import UnsupportedError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def storage_of(
    dtype: torch.dtype = torch.float32, *, quantized: PageDtypes | None = None, num_blocks: int = 5
) -> KVStorage:
    return KVStorage(num_blocks, 4, *states(0, dtype), quantized=quantized)


def states(num_tokens: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(num_tokens, 2, 8, generator=generator).to(dtype)
    return keys, torch.randn(num_tokens, 2, 6, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read(dtype: torch.dtype) -> None:
    storage, (keys, values) = storage_of(dtype), states(7, dtype)
    slots = torch.tensor([3, 0, 17, 9, 8, 5, 19])
    storage.write(keys, values, slots)
    read_keys, read_values = storage.read(slots)
    assert torch.equal(read_keys, keys) and torch.equal(read_values, values)
    assert torch.equal(storage.pages.k[4, :, 1], keys[2])  # slot 17 is offset 1 of block 4


def test_a_write_touches_its_slots_alone() -> None:
    storage = storage_of()
    storage.pages.k.zero_()
    storage.write(*states(1), torch.tensor([6]))
    assert storage.pages.k.flatten(2).any(-1).sum() == 2  # one block, its two heads
    assert not storage.pages.k[1, :, [0, 1, 3]].any()


@pytest.mark.parametrize("quantized", [None, *QUANTIZED.values()])
def test_blocks_are_copied_whole_and_survive_growth(quantized: PageDtypes | None) -> None:
    storage, (keys, values) = storage_of(quantized=quantized), states(4)
    storage.write(keys, values, torch.arange(4, 8))
    before = storage.read(torch.arange(4, 8))
    storage.copy([(1, 3)])
    storage.grow(9)
    assert storage.num_blocks == 9
    for slots in (torch.arange(4, 8), torch.arange(12, 16)):
        assert all(torch.equal(a, b) for a, b in zip(storage.read(slots), before, strict=True))


def test_blocks_of_compressed_keys_are_copied() -> None:
    """They have no values, and so no memory for these."""
    storage = KVStorage(3, 4, torch.empty(1, 1, 6), torch.empty(1, 1, 0))
    keys = torch.randn(4, 1, 6)
    storage.write(keys, keys[..., :0], torch.arange(4))
    storage.copy([(0, 2), (0, 1)])
    assert all(torch.equal(storage.read(torch.arange(4 * b, 4 * b + 4))[0], keys) for b in range(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_error_is_half_a_step_of_each_head(dtype: torch.dtype) -> None:
    storage, (keys, values) = storage_of(dtype, quantized=QUANTIZED["int8"]), states(5, dtype)
    keys[2, 0] *= 100  # an outlier spoils its own head only
    slots = torch.arange(5)
    storage.write(keys, values, slots)
    for read, written in zip(storage.read(slots), (keys, values), strict=True):
        largest = written.float().abs().amax(-1, keepdim=True)
        # half a step of 1/127, the scale's rounding over 127 steps, and the product's rounding
        bound = largest * (0.5 / 127 + 2 * torch.finfo(dtype).eps)
        assert ((read.float() - written.float()).abs() <= bound).all()


def test_int8_scale_by_hand() -> None:
    storage = storage_of(quantized=QUANTIZED["int8"])
    keys, values = torch.zeros(1, 2, 8), torch.zeros(1, 2, 6)
    keys[0, 1, :3] = torch.tensor([1.27, -0.635, 0.005])
    storage.write(keys, values, torch.tensor([2]))
    assert storage.pages.k_scales is not None and storage.pages.k_scales[0, 1, 2].item() == pytest.approx(0.01)
    assert storage.pages.k[0, 1, 2, :3].tolist() == [127, -64, 0]  # -63.5 and 0.5 go to the even neighbour
    assert storage.pages.k_scales[0, 0, 2] == 0 and not storage.read(torch.tensor([2]))[0][0, 0].any()


@pytest.mark.parametrize("quantized", [QUANTIZED["int8"], QUANTIZED["int4"]])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_non_finite_states_stay_in_their_token_and_head(number: float, quantized: PageDtypes) -> None:
    storage, (keys, values) = storage_of(quantized=quantized), states(2)
    keys[0, 0, 3] = number
    storage.write(keys, values, torch.tensor([0, 1]))
    read, _ = storage.read(torch.tensor([0, 1]))
    assert not read[0, 0].isfinite().any() if INT4 in quantized else not read[0, 0, 3].isfinite()
    assert not read[0, 1].isnan().any() and not read[1].isnan().any()


def test_int8_takes_half_the_bytes_and_a_scale() -> None:
    states = torch.empty(0, 2, 64, dtype=torch.bfloat16)
    plain = KVStorage(8, 4, states, states)
    small = KVStorage(8, 4, states, states, quantized=QUANTIZED["int8"])
    assert small.nbytes == plain.nbytes / 2 + 8 * 2 * 4 * 2 * 2


def test_int4_takes_a_quarter_of_the_bytes_and_a_scale_and_a_shift() -> None:
    states = torch.empty(0, 2, 64, dtype=torch.bfloat16)
    plain, small = KVStorage(8, 4, states, states), KVStorage(8, 4, states, states, quantized=QUANTIZED["int4"])
    assert small.nbytes == plain.nbytes / 4 + 8 * 2 * 4 * 2 * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_error_is_half_a_step_of_each_rotated_head(dtype: torch.dtype) -> None:
    storage, (keys, values) = storage_of(dtype, quantized=QUANTIZED["int4"]), states(5, dtype)
    slots = torch.arange(5)
    storage.write(keys, values, slots)
    for read, written in zip(storage.read(slots), (keys, values), strict=True):
        numbers = rotate(written.float())
        size = numbers.amax(-1, keepdim=True) - numbers.amin(-1, keepdim=True)
        bound = size * 0.5 / 15 + 16 * numbers.abs().amax(-1, keepdim=True) * torch.finfo(dtype).eps
        assert (rotate(read.float() - written.float()).abs() <= bound).all()


def test_int4_levels_by_hand() -> None:
    """Rotated, (2, -1, 2, -1) is (1, 3, 0, 0) with a range of 3: a step of 0.2, and 1.5 is its middle."""
    levels, scales = quantize(torch.tensor([[[2.0, -1.0, 2.0, -1.0]]]), INT4)
    assert levels.tolist() == [[[5 | 15 << 4, 0]]]
    assert scales.flatten().tolist() == pytest.approx([0.2, 7.5])
    torch.testing.assert_close(dequantize(levels, scales, torch.float32), torch.tensor([[[1.0, 3.0, 0.0, 0.0]]]))


def test_int4_of_equal_numbers_is_exact() -> None:
    for number in (0.0, 3.0, -0.5):
        states = rotate(torch.full((1, 1, 8), number))
        levels, scales = quantize(states, INT4)
        torch.testing.assert_close(rotate(dequantize(levels, scales, torch.float32)), states)


@pytest.mark.parametrize("dim", [1, 2, 3, 6, 8, 64, 80, 96, 128])
def test_a_rotation_is_its_own_inverse_and_keeps_products(dim: int) -> None:
    x, y = torch.randn(2, 5, dim, dtype=torch.float64)
    torch.testing.assert_close(rotate(rotate(x)), x)
    torch.testing.assert_close((rotate(x) * rotate(y)).sum(-1), (x * y).sum(-1))
    spread = rotate(torch.eye(dim, dtype=torch.float64)[0])  # over a block: the largest power of two that divides dim
    assert int((spread != 0).sum()) == dim & -dim


@pytest.mark.parametrize("dims", [(7, 8), (8, 7)])
def test_int4_of_an_odd_head_is_refused(dims: tuple[int, int]) -> None:
    keys, values = (torch.empty(0, 2, dim) for dim in dims)
    with pytest.raises(UnsupportedError, match="holds two numbers, and a head has 7; take 'int8'"):
        KVStorage(5, 4, keys, values, quantized=QUANTIZED["int4"])
    assert KVStorage(5, 4, keys, values, quantized=QUANTIZED["int8"]).num_blocks == 5


def test_writing_does_not_keep_a_graph() -> None:
    storage, (keys, values) = storage_of(), states(1)
    storage.write(keys.requires_grad_(), values, torch.tensor([0]))
    assert not storage.pages.k.requires_grad
