"""Rows that a backend finds in what it has packed are those of the dequantized weight, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hf_accel.kernels.cpu import library
from hf_accel.linear.backends.backend import Backend
from hf_accel.linear.backends.cpu import Cpu
from hf_accel.linear.backends.reference import Reference
from hf_accel.linear.backends.torch_int8 import TorchInt8
from hf_accel.linear.backends.triton import Triton
from hf_accel.linear.formats import Int2Weight, Int3Weight, Int4Weight, Int8Weight, QuantizedWeight

ROWS, INPUTS = 150, 96
BACKENDS = {"cpu": Cpu(), "reference": Reference(None), "triton": Triton(row_invariant=False)}
KINDS = ["int8", "int8 groups", "int8 minima", "int4", "int4 zero points", "int4 minima"]
FEWER = ["int3", "int3 zero points", "int3 minima", "int2", "int2 zero points", "int2 minima"]
OF_BITS = {"int4": Int4Weight, "int3": Int3Weight, "int2": Int2Weight}
WANTED = torch.tensor([0, 149, 64, 63, 1, 128, 64])  # the ends of blocks of 64, and one twice


def weight_of(kind: str, dtype: torch.dtype) -> QuantizedWeight:
    torch.manual_seed(0)
    groups = 1 if kind == "int8" else INPUTS // 32
    scale = (torch.rand(ROWS, groups) + 0.1).to(dtype)
    minimum = torch.rand(ROWS, groups).to(dtype) if kind.endswith("minima") else None
    if kind.startswith("int8"):
        return Int8Weight(torch.randint(-127, 128, (ROWS, INPUTS), dtype=torch.int8), scale, None, minimum)
    of, half = OF_BITS[kind[:4]], 1 << int(kind[3]) - 1
    zero_points = torch.randint(-half, half, scale.shape, dtype=torch.int8) if kind.endswith("points") else None
    made = of.from_integers(torch.randint(-half, half, (ROWS, INPUTS), dtype=torch.int8), scale, zero_points)
    return made.changed(weight_minimum=minimum)


def check(backend: Backend, weight: QuantizedWeight, dtype: torch.dtype) -> None:
    packed: Any = backend.pack(weight)
    expected = weight.dequantize(dtype)
    for wanted in (WANTED, WANTED[:3], WANTED[1:2], WANTED[:0]):
        assert torch.equal(backend.rows(packed, wanted, dtype), expected[wanted])
    for wrong in (-1, ROWS):
        with pytest.raises(IndexError):
            backend.rows(packed, torch.tensor([3, wrong]), dtype)
        with pytest.raises(IndexError):
            backend.rows(packed, torch.tensor([1, 2, 3, 4, 5, wrong]), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BACKENDS)
def test_rows_are_those_of_the_weight(name: str, kind: str, dtype: torch.dtype) -> None:
    check(BACKENDS[name], weight_of(kind, dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FEWER)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_rows_of_fewer_bits(name: str, kind: str, dtype: torch.dtype) -> None:
    check(BACKENDS[name], weight_of(kind, dtype), dtype)


@pytest.mark.parametrize(("stored", "asked"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_another_dtype_than_the_scales(kind: str, stored: torch.dtype, asked: torch.dtype) -> None:
    check(BACKENDS["cpu"], weight_of(kind, stored), asked)


def test_many_rows_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of("int4 zero points", torch.float32)
    packed, wanted, before = Cpu().pack(weight), torch.arange(ROWS - 1, -1, -1), torch.get_num_threads()
    monkeypatch.setattr(library, "_cores", 2)
    torch.set_num_threads(2)
    try:
        found = Cpu().rows(packed, wanted, torch.float32)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, weight.dequantize(torch.float32)[wanted])


def test_rows_that_lie_apart_and_rows_that_torch_records() -> None:
    weight = weight_of("int8", torch.bfloat16)
    packed, expected = Cpu().pack(weight), weight.dequantize(torch.bfloat16)[WANTED]
    for wanted in (torch.stack((WANTED, WANTED), dim=1)[:, 0], WANTED.int()):
        assert torch.equal(Cpu().rows(packed, wanted, torch.bfloat16), expected)
    graph: Any = make_fx(lambda wanted: Cpu().rows(packed, wanted, torch.bfloat16))(WANTED)
    assert "integer_rows" in str(graph.graph)
    assert torch.equal(graph(WANTED), expected)


def test_rows_of_a_kernel_of_torch() -> None:
    check(TorchInt8(), weight_of("int8", torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_rows_are_found_without_unpacking_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, unpacked = BACKENDS[name], type(BACKENDS[name]).unpack

    def few(self: Any, packed: Any) -> QuantizedWeight:
        found = unpacked(self, packed)
        assert found.shape[0] == len(WANTED)
        return found

    for kind in KINDS:
        packed = backend.pack(weight_of(kind, torch.float32))
        with monkeypatch.context() as patched:
            patched.setattr(type(backend), "unpack", few)
            backend.rows(packed, WANTED, torch.float32)
