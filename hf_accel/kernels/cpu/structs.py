"""The structs of the C interface: field for field those of src/*.h."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p


class Matrix(Structure):
    """linear.h"""

    _fields_ = (
        ("out_features", c_int64),
        ("weight", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("bias", c_void_p),
        ("scale_dtype", c_int32),
        ("bias_dtype", c_int32),
        ("column", c_int64),
    )


class Linear(Structure):
    """linear.h"""

    _fields_ = (
        ("format", c_int32),
        ("group", c_int32),
        ("in_features", c_int64),
        ("count", c_int32),
        ("epilogue", c_int32),
        ("matrices", POINTER(Matrix)),
    )


class PackCall(Structure):
    """packing.h"""

    _fields_ = (
        ("format", c_int32),
        ("threads", c_int32),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("stored", c_void_p),
        ("packed", c_void_p),
    )


class QuantizeCall(Structure):
    """packing.h"""

    _fields_ = (
        ("format", c_int32),
        ("dtype", c_int32),
        ("threads", c_int32),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("group", c_int64),
        ("weight", c_void_p),
        ("weight_stride", c_int64),
        ("scales", c_void_p),
        ("packed", c_void_p),
        ("finite", c_int32),
    )
