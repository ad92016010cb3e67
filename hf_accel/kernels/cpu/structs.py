"""The C structures of src/linear.h, packing.h and elementwise.h, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

EPILOGUES = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}


def _fields(**types: str) -> list[tuple[str, Any]]:
    """_fields(c_int64="rows size", ...): in this order."""
    known = {"pointers": c_void_p, "sizes": c_int64, "floats": c_float, "ints": c_int32}
    return [(name, known[kind.rstrip("_")]) for kind, names in types.items() for name in names.split()]


class Matrix(ctypes.Structure):
    _fields_ = _fields(
        sizes="out_features", pointers="weight scales zeros bias", ints="scale_dtype bias_dtype", sizes_="column"
    )


class Linear(ctypes.Structure):
    _fields_ = [
        *_fields(ints="format group", sizes="in_features", ints_="count epilogue"),
        ("matrices", ctypes.POINTER(Matrix)),
    ]  # fmt: skip


class LinearCall(ctypes.Structure):
    _fields_ = _fields(
        pointers="x", sizes="x_stride rows", pointers_="out", sizes_="out_stride", pointers__="residual",
        sizes__="residual_stride", ints="x_dtype out_dtype threads",
    )  # fmt: skip


class NormCall(ctypes.Structure):
    _fields_ = _fields(
        pointers="x residual sum out weight bias", sizes="x_stride residual_stride rows size", floats="eps offset",
        ints="kind round_first dtype weight_dtype bias_dtype out_dtype threads",
    )  # fmt: skip


class RopeCall(ctypes.Structure):
    _fields_ = _fields(
        pointers="q q_out", sizes="q_batch q_head q_token q_out_batch q_out_head q_out_token q_heads q_size",
        pointers_="k k_out", sizes_="k_batch k_head k_token k_out_batch k_out_head k_out_token k_heads k_size",
        pointers__="cos sin", sizes__="table_batch table_token batch tokens rotary_dim",
        ints="half_tables interleaved round_each dtype table_dtype threads",
    )  # fmt: skip


class GatedCall(ctypes.Structure):
    _fields_ = _fields(
        pointers="gate up out", sizes="gate_stride up_stride rows size", ints="activation dtype threads"
    )


class VocabularyCall(ctypes.Structure):
    _fields_ = _fields(pointers="logits", sizes="stride rows size k", pointers_="values indices", ints="dtype threads")


class PackCall(ctypes.Structure):
    _fields_ = _fields(ints="format threads", sizes="out_features in_features", pointers="stored packed")


class QuantizeCall(ctypes.Structure):
    _fields_ = _fields(
        ints="format dtype threads", sizes="out_features in_features group", pointers="weight",
        sizes_="weight_stride", pointers_="scales packed", ints_="finite",
    )  # fmt: skip
