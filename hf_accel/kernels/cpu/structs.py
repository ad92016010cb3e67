"""C structs as ctypes classes, and their bytes: each kernel's own stands in the file that calls it.

Names and order of the fields are those of src/kernels.h; sizes are compared when the library loads.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any

TYPES = {"pointers": c_void_p, "sizes": c_int64, "floats": c_float, "ints": c_int32}
CODES = {c_void_p: "Q", c_int64: "q", c_float: "f", c_int32: "i"}  # as Python's struct module has them
EPILOGUES = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}


def fields(**names: str) -> list[tuple[str, Any]]:
    """fields(sizes="rows size", pointers="x"): in this order; a kind that comes again has underscores behind it."""
    return [(name, TYPES[kind.rstrip("_")]) for kind, words in names.items() for name in words.split()]


def packed_format(kind: type[Structure]) -> str:
    """The format with which Python's struct module makes the struct's bytes, from its fields in order.

    Packing is one step in Python, whatever the number of fields; a ctypes object takes one for each.
    """
    codes, end = "", 0
    members: Any = kind._fields_
    for name, inner in members:
        field = getattr(kind, name)
        code = packed_format(inner)[1:] if issubclass(inner, Structure) else CODES[inner]
        codes += f"{field.offset - end}x{code}"
        end = field.offset + field.size
    return f"={codes}{ctypes.sizeof(kind) - end}x"


class Matrix(Structure):
    _fields_ = fields(
        sizes="out_features", pointers="weight scales zeros bias", ints="scale_dtype bias_dtype", sizes_="column"
    )


class Linear(Structure):
    _fields_ = [
        *fields(ints="format group", sizes="in_features", ints_="count epilogue"),
        ("matrices", ctypes.POINTER(Matrix)),
    ]  # fmt: skip


class LinearCall(Structure):
    _fields_ = fields(
        pointers="linear x", sizes="x_stride rows", pointers_="out", sizes_="out_stride",
        ints="x_dtype out_dtype threads",
    )  # fmt: skip
