"""Integer products by tiles have the bits of those by vectors; bf16 products add in the order that is documented."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.hardware import ISA_LEVELS
from hf_accel.hardware.isa_levels import choose_isa
from hf_accel.kernels.cpu import isa, library, refusal, using_isa
from hf_accel.kernels.cpu.attention import attend
from hf_accel.kernels.cpu.float_linear import FloatExperts, FloatLinear
from hf_accel.kernels.cpu.integer_linear import IntegerExperts, IntegerLinear, PackedWeight, quantize
from hf_accel.kernels.layouts import KV, AttentionOptions

from .conftest import running_level

NEVER = 2**31 - 1
STAND_INS = ("avx2_tiles", "avx512_bf16_tiles")
LEVELS = ("amx", *STAND_INS)
FORMATS = [
    (8, None, True),
    (8, 32, True),
    (8, 128, True),
    (8, 256, True),
    (4, 320, False),
    *((4, group, symmetric) for group in (32, 64, 128) for symmetric in (True, False)),
    *((bits, group, symmetric) for bits in (3, 2) for group, symmetric in ((32, False), (128, True))),
]


@pytest.fixture(params=LEVELS)
def tiles(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level that has tiles."""
    yield from running_level(request.param)


def packed(bits: int, group: int | None, *, symmetric: bool = True, outputs: int, inputs: int) -> PackedWeight:
    found = quantize(bits, torch.randn(outputs, inputs), group or inputs, symmetric=symmetric)
    assert found is not None
    return found[0]


def assert_as_by_vectors(linear: IntegerLinear, x: Tensor) -> None:
    """test_integer_linear.py holds the products by vectors against the oracle."""
    linear.tile_rows = NEVER
    expected = linear(x)
    linear.tile_rows = 1
    torch.testing.assert_close(linear(x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.covering(3)
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("outputs", [1, 70])
@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMATS)
def test_any_number_of_rows(bits: int, group: int | None, symmetric: bool, outputs: int) -> None:
    inputs = 3 * (group or 128)
    weight = packed(bits, group, symmetric=symmetric, outputs=outputs, inputs=inputs)
    linear = IntegerLinear([weight], [torch.randn(outputs)])
    x = torch.randn(65, inputs) * torch.logspace(-3, 3, 65)[:, None]
    for rows in range(1, 66):
        assert_as_by_vectors(linear, x[:rows])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("inputs", [1, 4, 63, 64, 65, 127, 129, 300])
def test_inputs_that_do_not_fill_a_group(inputs: int) -> None:
    linear = IntegerLinear([packed(8, None, outputs=130, inputs=inputs)], [None])
    assert_as_by_vectors(linear, torch.randn(33, inputs).bfloat16())


@pytest.mark.covering(3)
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("rows", [5, 64, 70])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 32), (4, 32), (3, 32), (2, 64)])
def test_more_inputs_than_a_panel(bits: int, group: int | None, rows: int) -> None:
    linear = IntegerLinear([packed(bits, group, outputs=65, inputs=4480)], [None])
    assert_as_by_vectors(linear, torch.randn(rows, 4480))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("bits", [8, 4])
def test_more_rows_than_are_summed_at_once(bits: int) -> None:
    linear = IntegerLinear([packed(bits, None if bits == 8 else 32, outputs=3, inputs=64)], [None])
    assert_as_by_vectors(linear, torch.randn(1030, 64))


@pytest.mark.covering(3)
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_any_number_of_threads(bits: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_cores", threads)
    weights = [packed(bits, None if bits == 8 else 64, outputs=outputs, inputs=192) for outputs in (130, 3, 64)]
    linear, few = IntegerLinear(weights, [None] * 3), IntegerLinear(weights[:1], [None])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 17, 64, 200):
            assert_as_by_vectors(linear, torch.randn(rows, 192))
            assert_as_by_vectors(few, torch.randn(rows, 192))
    finally:
        torch.set_num_threads(before)


@pytest.mark.covering(3)
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("epilogue", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_gate_and_up(bits: int, epilogue: str) -> None:
    weights = [packed(bits, None if bits == 8 else 32, outputs=70, inputs=128) for _ in range(2)]
    linear = IntegerLinear(weights, [torch.randn(70), None], epilogue=epilogue)
    assert_as_by_vectors(linear, torch.randn(40, 128).half())


def blocks_of(bits: int, group: int | None, floats: Tensor, *, symmetric: bool = True) -> list[PackedWeight]:
    """Each block of 64 outputs as a weight of its own, so that no other is read beside it."""
    found = [quantize(bits, part, group or floats.shape[1], symmetric=symmetric) for part in floats.split(64)]
    return [weights[0] for weights in found if weights is not None]


@pytest.mark.covering(3)
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("inputs", [100, 320])
@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMATS)
def test_blocks_that_are_read_side_by_side(bits: int, group: int | None, symmetric: bool, inputs: int) -> None:
    inputs = inputs if bits == 8 and not group else 5 * (group or 0)
    floats = [torch.randn(outputs, inputs) for outputs in (450, 130, 256)]
    biases = [torch.randn(450), None, torch.randn(256)]
    weights = [blocks_of(bits, group, part, symmetric=symmetric) for part in floats]
    wholes = [quantize(bits, part, group or inputs, symmetric=symmetric) for part in floats]
    linear = IntegerLinear([whole[0] for whole in wholes if whole], biases, tile_rows=NEVER)
    x = torch.randn(9, inputs) * torch.logspace(-3, 3, 9)[:, None]
    x[4, 7] = float("nan")
    for rows in range(1, 10):
        parts = []
        for whole, bias in zip(weights, biases, strict=True):
            of_blocks = [None] * len(whole) if bias is None else bias.split(64)
            parts += [IntegerLinear([w], [b])(x[:rows]) for w, b in zip(whole, of_blocks, strict=True)]
        torch.testing.assert_close(linear(x[:rows]), torch.cat(parts, dim=1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("outputs", [256, 330])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32), (3, 32)])
def test_gate_and_up_that_are_read_side_by_side(bits: int, group: int | None, outputs: int) -> None:
    floats = [torch.randn(outputs, 160) for _ in range(2)]
    wholes = [quantize(bits, part, group or 160) for part in floats]
    linear = IntegerLinear([whole[0] for whole in wholes if whole], [None] * 2, epilogue="silu", tile_rows=NEVER)
    pairs = zip(*(blocks_of(bits, group, part) for part in floats), strict=True)
    blocks = [IntegerLinear(list(pair), [None] * 2, epilogue="silu") for pair in pairs]
    x = torch.randn(8, 160).bfloat16()
    for rows in range(1, 9):
        assert torch.equal(linear(x[:rows]), torch.cat([block(x[:rows]) for block in blocks], dim=1))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("counts", [[1, 0, 1], [3, 8, 0], [1, 9, 2], [8, 8, 8]])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32)])
def test_experts_whose_blocks_are_read_side_by_side(bits: int, group: int | None, counts: list[int]) -> None:
    floats = [torch.randn(330, 128) for _ in counts]
    wholes = [quantize(bits, part, group or 128) for part in floats]
    x, starts = torch.randn(sum(counts), 128), torch.tensor([0, *torch.tensor(counts).cumsum(0)])
    experts = IntegerExperts([whole[0] for whole in wholes if whole], None)
    parts = []
    for part, rows in zip(floats, x.split(counts), strict=True):
        blocks = [IntegerLinear([block], [None]) for block in blocks_of(bits, group, part)]
        parts.append(torch.cat([block(rows) for block in blocks], dim=1))
    assert torch.equal(experts.grouped(x, starts), torch.cat(parts))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_not_finite_stays_in_its_row(bits: int) -> None:
    linear = IntegerLinear([packed(bits, None if bits == 8 else 64, outputs=70, inputs=256)], [None])
    x = torch.randn(40, 256)
    x[20, 200] = float("nan")
    assert_as_by_vectors(linear, x)
    assert linear(x).isnan().any(dim=1).nonzero().tolist() == [[20]]


def test_the_stand_in_is_never_chosen_by_itself() -> None:
    features: frozenset[str] = frozenset()
    for level in ISA_LEVELS.values():
        features |= level.needs
        assert choose_isa(features) not in STAND_INS
    assert choose_isa(features) == "amx"


@pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
def test_a_system_without_permission_for_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next best level is taken; it is an error only if the level was asked for."""
    isa()  # loads the library, so that the real choice is made
    real = library.ctypes.CDLL

    class Refuses:
        def __init__(self, path: str) -> None:
            self.library = real(path)
            self.hfa_error = lambda: b"the system does not permit AMX tiles"

        def __getattr__(self, name: str) -> object:
            return getattr(self.library, name)

        def hfa_select(self, level: bytes) -> int:
            return int(level == b"amx")

    monkeypatch.setattr(library.ctypes, "CDLL", Refuses)
    monkeypatch.setattr(library, "_selected", [])
    monkeypatch.setattr(library, "instruction_sets", lambda: ISA_LEVELS["amx"].needs)
    monkeypatch.delenv("HF_ACCEL_ISA", raising=False)
    library._library.__wrapped__()
    assert library._selected == ["avx512_vnni_bf16"]
    monkeypatch.setenv("HF_ACCEL_ISA", "amx")
    with pytest.raises(UnsupportedError, match=r"HF_ACCEL_ISA='amx': the system does not permit AMX tiles; unset it"):
        library._library.__wrapped__()


def sums_of_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T as tiles of bf16 add: 32 inputs at a time, even and odd ones apart, each sum rounded to float32."""
    padding = -x.shape[1] % 32
    left, right = (torch.nn.functional.pad(t.float(), (0, padding)) for t in (x, weight))
    out = torch.zeros(len(x), len(weight))
    for start in range(0, left.shape[1], 32):
        halves = []
        for k in (start, start + 1):
            sums = torch.zeros_like(out)
            for i in range(k, start + 32, 2):
                sums = sums + left[:, i, None] * right[None, :, i]  # a product of two bfloat16 is exact
            halves.append(sums)
        out = out + (halves[0] + halves[1])
    return out


@pytest.mark.covering(3)
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 64, 65, 150])
@pytest.mark.parametrize("inputs", [1, 2, 31, 32, 33, 511, 513, 1100])
def test_bf16_in_the_documented_order(inputs: int, outputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs)
    x = torch.randn(150, inputs).bfloat16()  # weights of more than 128 rows are copied
    linear = FloatLinear([weight], [bias])
    expected = (sums_of_tiles(x, weight) + bias).bfloat16()
    for rows in (1, 15, 16, 17, 32, 33, 48, 65, 128, 129, 150):
        assert torch.equal(linear(x[:rows]), expected[:rows])


@pytest.mark.usefixtures("tiles")
def test_bf16_denormals_count_as_zero() -> None:
    weight = torch.tensor([[1.0, 2.0**-130], [2.0**-70, 0.0]]).bfloat16()
    x = torch.tensor([[2.0**-130, 1.0], [2.0**-70, 0.0], [1.0, 0.0]]).bfloat16()
    assert FloatLinear([weight], [None])(x).tolist() == [[0.0, 0.0], [2.0**-70, 0.0], [1.0, 2.0**-70]]


@pytest.mark.usefixtures("tiles")
def test_bf16_rows_below_the_fewest_are_added_by_vectors() -> None:
    weight, x = torch.randn(33, 1100).bfloat16(), torch.randn(20, 1100).bfloat16()
    by_tiles, mixed, by_vectors = (FloatLinear([weight], [None], tile_rows=n) for n in (1, 16, NEVER))
    assert torch.equal(mixed(x), by_tiles(x))
    assert torch.equal(mixed(x[:15]), by_vectors(x[:15]))
    torch.testing.assert_close(by_tiles(x), by_vectors(x))


def levels_of_pairs() -> list[str]:
    """The levels whose attention is multiplied by tiles, of those that run here."""
    found = []
    for level in ("amx", "avx512_bf16_tiles"):
        with contextlib.suppress(UnsupportedError), using_isa(level):
            found.append(level)
    return found


@pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
@pytest.mark.parametrize("dims", [(64, 64), (40, 100), (3, 33)], ids=str)
@pytest.mark.parametrize("window", [None, 77])
def test_attention_by_tiles(window: int | None, dims: tuple[int, int]) -> None:
    """Any number of queries gives a row the same bits, and AMX those of the loops; all are near to float32's."""
    dim, value_dim = dims
    q, k, v = torch.randn(1, 6, 60, dim), torch.randn(1, 2, 650, dim), torch.randn(1, 2, 650, value_dim)
    q, k, v = (tensor.bfloat16() for tensor in (q, k, v))
    options = AttentionOptions(dim**-0.5, causal=True, window=window)
    if not (levels := levels_of_pairs()):
        pytest.skip("needs AVX-512 with BF16")
    near, found = attend(q.float(), KV(k.float(), v.float()), options), []
    for level in levels:
        with using_isa(level):
            whole = attend(q, KV(k, v), options)
            for last in (1, 2, 3, 8, 59):  # the last queries, as decode and drafts compute them
                assert torch.equal(attend(q[:, :, -last:], KV(k, v), options), whole[:, -last:])
            first = attend(q[:, :, :20], KV(k[:, :, :-40], v[:, :, :-40]), options)  # as chunks of a prompt
            assert torch.equal(first, whole[:, :20])
        found.append(whole)
        torch.testing.assert_close(whole.float(), near, rtol=0.02, atol=0.02)
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("inputs", [75, 96])
@pytest.mark.parametrize("counts", [[1, 0, 1, 1], [0, 500, 1, 37, 0, 90, 2], [600, 1400, 0, 700, 16], [4200]])
def test_bf16_experts_as_each_alone(counts: list[int], inputs: int) -> None:
    """More rows than are packed at once, of one expert and of several."""
    weights, biases = torch.randn(len(counts), 150, inputs).bfloat16(), torch.randn(len(counts), 150)
    x, starts = torch.randn(sum(counts), inputs).bfloat16(), torch.tensor([0, *torch.tensor(counts).cumsum(0)])
    parts = [
        FloatLinear([weight], [bias])(rows)
        for weight, bias, rows in zip(weights, biases, x.split(counts), strict=True)
        if len(rows)
    ]
    assert torch.equal(FloatExperts(weights, biases).grouped(x, starts), torch.cat(parts))
