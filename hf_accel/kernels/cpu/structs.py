"""The C structs that several kernels share, as ctypes classes. The struct of one kernel is in the file that calls it.

The fields have the names and the order of src/kernels.h. The sizes of the structs are compared when the library loads.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any

from ...errors import UnsupportedError

C_TYPES = {"pointers": c_void_p, "sizes": c_int64, "floats": c_float, "ints": c_int32}
CODES = {c_void_p: "Q", c_int64: "q", c_float: "f", c_int32: "i"}  # the format characters of Python's struct module
EPILOGUES = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}
ACTIVATIONS = {"silu": 4, "gelu": 5, "gelu_tanh": 6, "gelu_quick": 7, "relu": 8}


def epilogue_number(epilogue: str | None, activation: str | None) -> int:
    """The number with which a Linear names what follows its product: a gate's epilogue, or an activation.

    Raises UnsupportedError for a name that is not known, and for both at once.
    """
    for kind, name, known in (("epilogue", epilogue, EPILOGUES), ("activation", activation, ACTIVATIONS)):
        if name is not None and name not in known:
            names = [known_name for known_name in known if known_name]
            raise UnsupportedError(f"linear: {kind} {name!r} is not known; choose one of {names}")
    if epilogue and activation:
        raise UnsupportedError(
            f"linear: {epilogue=} and {activation=}; a product has one of both, leave out the other"
        )
    return ACTIVATIONS[activation] if activation else EPILOGUES[epilogue]


def fields(**names: str) -> list[tuple[str, Any]]:
    """Make the _fields_ of a struct. For example, fields(sizes="rows size", pointers="x") makes three fields in order.

    A keyword is a key of C_TYPES. If a type is needed again later in the struct, underscores are appended to it.
    """
    return [(name, C_TYPES[kind.rstrip("_")]) for kind, words in names.items() for name in words.split()]


def packed_format(kind: type[Structure]) -> str:
    """Return the format with which Python's struct module packs the struct's fields.

    This is faster than a ctypes object, which sets the fields one by one.
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
        sizes="out_features",
        pointers="weight scales zeros minima bias",
        ints="scale_dtype bias_dtype",
        sizes_="column",
        floats="divisor",
    )


class Linear(Structure):
    _fields_ = [
        *fields(ints="format group", sizes="in_features", ints_="count epilogue"),
        ("matrices", ctypes.POINTER(Matrix)),
    ]  # fmt: skip


class LinearCall(Structure):
    _fields_ = fields(
        pointers="linear x", sizes="x_stride rows", pointers_="out", sizes_="out_stride",
        ints="x_dtype out_dtype threads tile_rows",
    )  # fmt: skip


class ExpertsCall(Structure):
    _fields_ = fields(
        pointers="linear x", sizes="x_stride rows", pointers_="out", sizes_="out_stride", pointers__="starts",
        ints="x_dtype out_dtype threads tile_rows",
    )  # fmt: skip


class Columns(Structure):
    _fields_ = fields(sizes="buffer offset stride")


class ScoreBias(Structure):
    _fields_ = fields(pointers="data", sizes="head query")


class LayerOp(Structure):
    _fields_ = [
        *fields(ints="kind weight_dtype"),
        *[(place, Columns) for place in ("x", "y", "out", "out2", "z")],
        *fields(pointers="weight bias", sizes="heads kv_heads dim value_dim window ahead"),
        ("score_bias", ScoreBias),
        *fields(floats="eps offset scale softcap", ints="round_first interleaved round_each tile_rows bias_dtype"),
    ]  # fmt: skip
