"""Products by tiles have the bits of products by vectors, whatever the number of rows, groups and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.hardware import processor
from hf_accel.hardware.processor import ISA_LEVELS
from hf_accel.kernels.cpu import integer_linear, isa, library, refusal, using_isa
from hf_accel.kernels.cpu.integer_linear import IntegerLinear, PackedWeight, quantize

LEVELS = ("amx", "portable_tiles")
FORMATS = [(8, 128, True), *((4, group, symmetric) for group in (32, 64, 128) for symmetric in (True, False))]


@pytest.fixture(params=LEVELS)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A level whose tiles multiply from the first row on."""
    if reason := refusal():
        pytest.skip(reason)
    for bits in integer_linear.TILE_ROWS:
        monkeypatch.setitem(integer_linear.TILE_ROWS, bits, 1)
    try:
        with using_isa(request.param):
            pass
    except UnsupportedError as error:
        pytest.skip(str(error))
    yield request.param


def packed(bits: int, group: int, *, symmetric: bool = True, outputs: int, inputs: int) -> PackedWeight:
    found = quantize(bits, torch.randn(outputs, inputs), group, symmetric=symmetric)
    assert found is not None
    return found[0]


def assert_as_by_vectors(tiles: str, call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with using_isa("portable"):
        expected = call(x)
    with using_isa(tiles):
        got = call(x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("outputs", [1, 70])
@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMATS)
def test_any_number_of_rows(tiles: str, bits: int, group: int, symmetric: bool, outputs: int) -> None:
    weight = packed(bits, group, symmetric=symmetric, outputs=outputs, inputs=3 * group)
    linear = IntegerLinear([weight], [torch.randn(outputs)])
    x = torch.randn(65, 3 * group) * torch.logspace(-3, 3, 65)[:, None]
    for rows in range(1, 66):
        assert_as_by_vectors(tiles, linear, x[:rows])


@pytest.mark.parametrize("inputs", [1, 4, 63, 64, 65, 127, 129, 300])
def test_inputs_that_do_not_fill_a_group(tiles: str, inputs: int) -> None:
    linear = IntegerLinear([packed(8, 128, outputs=130, inputs=inputs)], [None])
    assert_as_by_vectors(tiles, linear, torch.randn(33, inputs).bfloat16())


@pytest.mark.parametrize("rows", [5, 64, 70])
@pytest.mark.parametrize(("bits", "group"), [(8, 128), (4, 32)])
def test_more_inputs_than_a_panel(tiles: str, bits: int, group: int, rows: int) -> None:
    linear = IntegerLinear([packed(bits, group, outputs=65, inputs=4480)], [None])
    assert_as_by_vectors(tiles, linear, torch.randn(rows, 4480))


@pytest.mark.parametrize("bits", [8, 4])
def test_more_rows_than_are_summed_at_once(tiles: str, bits: int) -> None:
    linear = IntegerLinear([packed(bits, 32, outputs=3, inputs=64)], [None])
    assert_as_by_vectors(tiles, linear, torch.randn(1030, 64))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bits", [8, 4])
def test_any_number_of_threads(tiles: str, bits: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_cores", threads)
    weights = [packed(bits, 64, outputs=outputs, inputs=192) for outputs in (130, 3, 64)]
    linear, few = IntegerLinear(weights, [None] * 3), IntegerLinear(weights[:1], [None])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 17, 64, 200):
            assert_as_by_vectors(tiles, linear, torch.randn(rows, 192))
            assert_as_by_vectors(tiles, few, torch.randn(rows, 192))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("epilogue", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bits", [8, 4])
def test_gate_and_up(tiles: str, bits: int, epilogue: str) -> None:
    weights = [packed(bits, 32, outputs=70, inputs=128) for _ in range(2)]
    linear = IntegerLinear(weights, [torch.randn(70), None], epilogue=epilogue)
    assert_as_by_vectors(tiles, linear, torch.randn(40, 128).half())


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_not_finite_stays_in_its_row(tiles: str, bits: int) -> None:
    linear = IntegerLinear([packed(bits, 64, outputs=70, inputs=256)], [None])
    x = torch.randn(40, 256)
    x[20, 200] = float("nan")
    assert_as_by_vectors(tiles, linear, x)
    with using_isa(tiles):
        assert linear(x).isnan().any(dim=1).nonzero().tolist() == [[20]]


def test_fewest_rows_are_those_of_the_constant(tiles: str) -> None:
    """The level may multiply fewer rows by vectors: nobody can tell from the bits."""
    weight = packed(8, 128, outputs=70, inputs=300)
    integer_linear.TILE_ROWS[8] = 20
    for rows in (19, 20):
        assert_as_by_vectors(tiles, IntegerLinear([weight], [None]), torch.randn(rows, 300))


def test_the_stand_in_is_never_chosen_by_itself() -> None:
    features: frozenset[str] = frozenset()
    for needed in ISA_LEVELS.values():
        features |= needed
        assert processor.choose_isa(features) != "portable_tiles"
    assert processor.choose_isa(features) == "amx"


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
    monkeypatch.setattr(library, "instruction_sets", lambda: ISA_LEVELS["amx"])
    monkeypatch.delenv("HF_ACCEL_ISA", raising=False)
    library._library.__wrapped__()
    assert library._selected == ["avx512_vnni_bf16"]
    monkeypatch.setenv("HF_ACCEL_ISA", "amx")
    with pytest.raises(UnsupportedError, match=r"HF_ACCEL_ISA='amx': the system does not permit AMX tiles; unset it"):
        library._library.__wrapped__()
