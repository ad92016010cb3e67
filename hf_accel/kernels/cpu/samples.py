"""Reads numbers that are spread over many tensors, in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure

from torch import Tensor

from .library import fields, kernel, shared_struct


@shared_struct
class SampledTensor(Structure):
    _fields_ = fields(pointers="numbers", sizes="step count size")


class SamplesCall(Structure):
    _fields_ = fields(pointers="tensors out", sizes="count")


_samples = kernel("samples", SamplesCall)


class SampleTable:
    """Where numbers of tensors are in memory. It keeps no tensor alive."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """parts: views [n] of the tensors, of any stride and of 1, 2, 4 or 8 bytes a number."""
        places = [(each.data_ptr(), each.stride(0) * each.itemsize, len(each), each.itemsize) for each in parts]
        self._places = (SampledTensor * len(places))(*places)
        self._nbytes = sum(each.nbytes for each in parts)

    def read(self) -> bytes:
        """Return the bytes of all numbers as they are now. All tensors must still be where they were."""
        if not self._nbytes:
            return b""
        out = (ctypes.c_uint8 * self._nbytes)()
        _samples(ctypes.addressof(self._places), ctypes.addressof(out), len(self._places))
        return bytes(out)
