"""The C structures of src/linear.h."""

from __future__ import annotations

import ctypes


class Matrix(ctypes.Structure):
    _fields_ = [  # noqa: RUF012
        ("out_features", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scale_dtype", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
        ("column", ctypes.c_int64),
    ]


class Linear(ctypes.Structure):
    _fields_ = [  # noqa: RUF012
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("in_features", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("epilogue", ctypes.c_int32),
        ("matrices", ctypes.POINTER(Matrix)),
    ]


class LinearCall(ctypes.Structure):
    _fields_ = [  # noqa: RUF012
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("residual", ctypes.c_void_p),
        ("residual_stride", ctypes.c_int64),
        ("x_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


EPILOGUES = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}
