"""The structs of C++ and those of Python: the same names, types and order. Sizes alone cannot tell."""

from __future__ import annotations

import ctypes
import re
import struct
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import pytest

from hf_accel.kernels.cpu import (  # noqa: F401  # each of these says its structs
    attention,
    cross_entropy,
    delta_rule,
    draws,
    gated_norm,
    head_products,
    integer_linear,
    layer_call,
    library,
    low_rank,
    mixture,
    page_conv,
    row_conv,
    row_kernels,
    short_conv,
    state_scan,
)
from hf_accel.kernels.cpu.build import SOURCE
from hf_accel.kernels.cpu.library import ACTIVATIONS, EPILOGUES, packed_format

SOURCES = "".join((SOURCE / name).read_text(encoding="utf-8") for name in ("kernels.h", "draft.h", "layer.h"))
HEADER = re.sub(r"//.*", "", SOURCES)
TYPES = (SOURCE / "types.h").read_text(encoding="utf-8")
KERNELS = dict(re.findall(r"KERNEL\((\w+), (\w+)\)", HEADER))
INNER = [
    attention.Rows, attention.PageWrite, layer_call.Columns, layer_call.DraftedSequence, layer_call.SourcePages,
    layer_call.StatePages, library.ScoreBias, low_rank.Adapters, row_kernels.Rotated,
]  # fmt: skip
STRUCTS = {s.__name__: s for s in (*library._structs.values(), *INNER)}
SCALARS = {"int64_t": c_int64, "int32_t": c_int32, "float": c_float}


def declared(name: str) -> list[tuple[str, object]]:
    """Fields of a struct of the header: (name, ctypes type), a pointer of any kind as c_void_p."""
    body = re.search(rf"^struct {name} {{(.*?)^}};", HEADER, re.MULTILINE | re.DOTALL)
    assert body is not None
    fields = []
    for line in filter(None, (part.strip() for part in body[1].split(";"))):
        kind, names = re.fullmatch(r"(?:const )?(\w+\*?) (.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
        for word in names.split(","):
            pointer = kind.endswith("*")
            fields.append((word.strip(), c_void_p if pointer else SCALARS.get(kind) or STRUCTS[kind]))
    return fields


def of_python(kind: type[Structure]) -> list[tuple[str, object]]:
    return [(name, c_void_p if issubclass(t, ctypes._Pointer) else t) for name, t, *_ in kind._fields_]


def test_every_kernel_is_called() -> None:
    called = {name: kind.__name__ for name, kind in library._structs.items()}
    others = {name: name for name in ("LayerOp", "Linear", "LowRank", "Matrix", "SampledTensor")}
    assert called == KERNELS | others | {"layer": "LayerCall", "draft": "DraftCall"}


@pytest.mark.parametrize("name", STRUCTS)
def test_fields(name: str) -> None:
    assert of_python(STRUCTS[name]) == declared(name)


@pytest.mark.parametrize("name", sorted({*KERNELS.values(), "LayerCall", "DraftCall"}))
def test_packed_bytes_are_those_of_ctypes(name: str) -> None:
    kind, form = STRUCTS[name], struct.Struct(packed_format(STRUCTS[name]))
    assert form.size == ctypes.sizeof(kind)
    numbers = list(range(1, 1 + len(form.unpack(bytes(form.size)))))
    assert numbers_in(kind.from_buffer_copy(form.pack(*numbers))) == numbers


def numbers_in(filled: Structure) -> list[object]:
    values = [getattr(filled, name) for name, *_ in filled._fields_]
    return [n for value in values for n in (numbers_in(value) if isinstance(value, Structure) else [value])]


def test_numbers_of_names() -> None:
    """Those of the enums are written on both sides too."""
    dtypes = dict(re.findall(r"(\w+) = (\d)", re.search(r"enum Dtype[^}]*", TYPES)[0]))  # type: ignore[index]
    assert [int(dtypes[name]) for name in ("F32", "BF16", "F16", "INT8", "FP8", "INT4")] == list(
        library.DTYPES.values()
    )
    assert {bits: int(dtypes[f"INT{bits}"]) for bits in (8, 4, 3, 2)} == integer_linear.FORMATS
    assert int(dtypes["FP4"]) == integer_linear.FP4
    kinds = re.search(r"enum LayerOpKind : int32_t {(.*?)}", HEADER)[1]  # type: ignore[index]
    assert tuple(kinds.lower().replace(" ", "").split(",")) == layer_call.OPERATIONS
    drawn = re.findall(r"(\w+) = (\d)", re.search(r"enum Draw .*", HEADER)[0])  # type: ignore[index]
    assert [getattr(draws, name) for name, _ in drawn] == [int(number) for _, number in drawn]
    for enum, numbers in (("Epilogue", EPILOGUES), ("Activation", ACTIVATIONS)):
        found = re.findall(r"= (\d+)", re.search(rf"enum {enum}.*", HEADER)[0])  # type: ignore[index]
        assert list(map(int, found)) == list(numbers.values())
    named = re.findall(r"(\w+) = \d+", re.search(r"enum Activation.*", HEADER)[0])  # type: ignore[index]
    assert [name.lower() for name in named] == list(ACTIVATIONS)
