"""Products of low rank that adapters add to a linear layer: scale * b (a x), in the rows that ask for it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure
from typing import NamedTuple

import torch
from torch import Tensor

from .library import DTYPES, Linear, Matrix, fields, kernel, shared_struct, threads

GROUP_ROWS = 16  # of a group: a thread computes one


@shared_struct
class LowRank(Structure):
    _fields_ = fields(pointers="a b", sizes="rank", floats="scale", ints="dtype")


class Adapters(Structure):
    """The adapters of a pass; see Adapters in kernels.h."""

    _fields_ = fields(pointers="parts groups rows", sizes="stride count")


class AdaptCall(Structure):
    _fields_ = [
        ("adapters", Adapters),
        *fields(
            pointers="linear x base out", sizes="x_stride base_stride out_stride", ints="dtype base_dtype threads"
        ),
    ]


_adapt = kernel("adapt", AdaptCall)
NO_PART = bytes(ctypes.sizeof(LowRank))  # of a layer that an adapter leaves as it is


def part_fields(a: Tensor, b: Tensor, scale: float) -> bytes:
    """Return the struct of one part. a, b: the transposed matrix a, and b, of one dtype, both `by_block`."""
    return bytes(LowRank(a.data_ptr(), b.data_ptr(), a.shape[1], scale, DTYPES[a.dtype]))


class RowGroups(NamedTuple):
    """The rows of a pass that have adapters. groups: [n, 3] int64, AdaptedRows in kernels.h. rows: int32."""

    groups: Tensor
    rows: Tensor

    @staticmethod
    def of(rows_of_adapters: Sequence[Sequence[int]]) -> RowGroups:
        """rows_of_adapters: for each adapter the numbers of its rows."""
        groups, start = [], 0
        for adapter, rows in enumerate(rows_of_adapters):
            for first in range(0, len(rows), GROUP_ROWS):
                groups.append((adapter, start + first, min(GROUP_ROWS, len(rows) - first)))
            start += len(rows)
        every = [row for rows in rows_of_adapters for row in rows]
        return RowGroups(torch.tensor(groups, dtype=torch.int64).view(-1, 3), torch.tensor(every, dtype=torch.int32))


class PartTable(NamedTuple):
    """The parts of several adapters for a few linear layers. num_parts: how many of them there are."""

    parts: Tensor  # bytes
    num_layers: int
    num_parts: int

    @staticmethod
    def of(parts: Sequence[Sequence[bytes | None]]) -> PartTable:
        """parts: for each adapter the fields of its part for each layer, None where it has none."""
        joined = b"".join(NO_PART if part is None else part for each in parts for part in each)
        count = sum(part is not None for each in parts for part in each)
        return PartTable(torch.frombuffer(bytearray(joined), dtype=torch.uint8), len(parts[0]), count)

    def fields(self, given: RowGroups) -> tuple[int, int, int, int, int]:
        """Return the fields of Adapters for a pass."""
        return (
            self.parts.data_ptr(), given.groups.data_ptr(), given.rows.data_ptr(), self.num_layers, len(given.groups)
        )  # fmt: skip


def adapt(x: Tensor, out: Tensor, table: PartTable, given: RowGroups) -> None:
    """Add to out what adapters add to the product of one layer. x: [N, in], out: [N, out], of one dtype of FLOATS; the
    last strides are 1.
    """
    matrix = (Matrix * 1)(Matrix(out_features=out.shape[1]))
    linear = Linear(in_features=x.shape[1], count=1, matrices=matrix)
    dtype = DTYPES[x.dtype]
    _adapt(
        *table.fields(given), ctypes.addressof(linear), x.data_ptr(), out.data_ptr(), out.data_ptr(), x.stride(0),
        out.stride(0), out.stride(0), dtype, dtype, threads(),
    )  # fmt: skip
