"""Tables that a module keeps, of which its code takes the rows of its tokens' positions: the sines and cosines of
GPT-J and CodeGen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .of_positions import OfPositions
from .operation import UntraceableError
from .symbols import BATCH, TOKENS, Opaque


class OwnTables(NamedTuple):
    """The cos and sin of half a head, as columns of a table [P, D] that a module keeps.

    cos, sin: the first column of each. size: how many they have. dtype: to which the code rounds them.
    """

    table: Tensor
    cos: int
    sin: int
    size: int
    dtype: torch.dtype

    def are(self, other: OwnTables) -> bool:
        return self.table is other.table and self[1:] == other[1:]

    def of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions [B, T], each [B, T, size]. Raises IndexError for one without a row."""
        rows = F.embedding(positions, self.table).to(self.dtype)
        return rows[..., self.cos : self.cos + self.size], rows[..., self.sin : self.sin + self.size]


class TableStandIn(Opaque):
    """A table [P, D] that a module keeps; repeated: the same for each row of a pass, [B, P, D]."""

    def __init__(self, table: Tensor, *, repeated: bool = False) -> None:
        rows, columns = table.shape
        shape = (BATCH, rows, columns) if repeated else (rows, columns)
        super().__init__("a table", device=table.device, dtype=table.dtype, shape=shape)
        vars(self)["_table"] = table

    def repeat(self, *counts: Any) -> TableStandIn:
        if len(self.shape) != 2 or len(counts) != 3 or counts[0] is not BATCH or counts[1:] != (1, 1):
            raise UntraceableError("it repeats a table in a way of its own")
        return TableStandIn(self._table, repeated=True)

    def __getitem__(self, positions: Any) -> TableRows:
        if len(self.shape) != 2 or not isinstance(positions, OfPositions) or not positions.is_given:
            raise UntraceableError("it takes other parts of a table than rows of positions")
        return TableRows(self._table, self.dtype, (0, self.shape[1]))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        table, *others = args
        if function is not torch.gather or not isinstance(table, cls) or kwargs or len(others) != 2:
            return super().__torch_function__(function, types, args, kwargs)
        dim, positions = others
        known = len(table.shape) == 3 and dim == 1 and isinstance(positions, OfPositions)
        if not known or not positions.is_repeated(table.shape[2]):
            raise UntraceableError("it takes other parts of a table than rows of positions")
        return TableRows(table._table, table.dtype, (0, table.shape[2]))


class TableRows(Opaque):
    """The rows of the positions of tokens, [B, T, D], or columns of them. columns: the first, and the one behind."""

    def __init__(self, table: Tensor, dtype: torch.dtype, columns: tuple[int, int]) -> None:
        shape = (BATCH, TOKENS, columns[1] - columns[0])
        super().__init__("rows of a table", dtype=dtype, shape=shape)
        vars(self).update(_table=table, _columns=columns)

    def to(self, dtype: Any) -> TableRows:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or self.dtype is not self._table.dtype:
            raise UntraceableError("it computes with a table in a way of its own")
        return TableRows(self._table, dtype, self._columns)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.split or len(args) != 2 or kwargs != {"dim": -1} or type(args[1]) is not int:
            return super().__torch_function__(function, types, args, kwargs)
        rows, size = args
        start, stop = rows._columns
        if size < 1 or (stop - start) % size:
            raise UntraceableError("it divides a table into other parts than columns")
        return tuple(TableRows(rows._table, rows.dtype, (at, at + size)) for at in range(start, stop, size))


def own_tables(cos: Any, sin: Any) -> OwnTables:
    """Return what code rotates by that takes cos and sin from a table of its own. Raises UntraceableError."""
    if not isinstance(cos, TableRows) or not isinstance(sin, TableRows):
        raise UntraceableError("it rotates in a way of its own")
    size = cos.shape[2]
    if cos._table is not sin._table or cos.dtype is not sin.dtype or sin.shape[2] != size:
        raise UntraceableError("its cos and sin are of two tables")
    return OwnTables(cos._table, cos._columns[0], sin._columns[0], size, cos.dtype)
