"""The columns into which code divides what stands for a tensor, or those of each head."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

from .operation import Span, UntraceableError
from .symbols import BATCH, Opaque

OTHER_PARTS = "it divides a tensor into other parts than columns"
NO_COLUMNS = "it takes other parts of a tensor than columns"


def even_columns(x: Any, count: int) -> list[Any]:
    """Return columns side by side, of one width. x: a StandIn."""
    size = x.width // (x.heads or 1)
    if count < 1 or size % count:
        raise UntraceableError(OTHER_PARTS)
    width = size // count
    return [x[..., place * width : (place + 1) * width] for place in range(count)]


def columns_of_chunks(x: Any, chunks: Any, dim: Any) -> tuple[Any, ...]:
    """Return what Tensor.chunk does."""
    if type(chunks) is not int or x.flat or dim not in (-1, len(x.shape) - 1):
        raise UntraceableError(OTHER_PARTS)
    return tuple(even_columns(x, chunks))


def split_of_sizes(x: Any, size: Any, dim: Any) -> tuple[Any, ...]:
    """Return what Tensor.split does. size: of each part, or of all; or the lengths of packed sequences."""
    if isinstance(size, Opaque):
        sequences: tuple[Any, ...] = size.split(x, dim)
        return sequences
    if type(size) in (list, tuple):
        known = all(type(each) is int and each > 0 for each in size) and not x.flat
        if not known or dim not in (-1, len(x.shape) - 1) or sum(size) != x.shape[-1]:
            raise UntraceableError(OTHER_PARTS)
        return tuple(x[..., end - each : end] for end, each in zip(accumulate(size), size, strict=True))
    if type(size) is not int or size < 1 or x.shape[-1] % size:
        raise UntraceableError(OTHER_PARTS)
    return columns_of_chunks(x, x.shape[-1] // size, dim)


def some_heads(x: Any, index: Any) -> Any:
    """Return some heads of a tensor [B, T, heads, dim]. x: a StandIn. index: a slice, or a list with one place."""
    if type(index) is list and len(index) == 1 and type(index[0]) is int:
        index = slice(index[0], index[0] + 1 or None)
    if x.transposed or x.cached or x.span.head or not isinstance(index, slice) or index.step is not None:
        raise UntraceableError(NO_COLUMNS)
    (start, stop, _), dim = index.indices(x.heads), x.width // x.heads
    if stop <= start:
        raise UntraceableError(NO_COLUMNS)
    span = Span(x.span.buffer, x.span.offset + start * dim, x.span.stride)
    return replace(x, span=span, width=(stop - start) * dim, heads=stop - start)


class HeadsOfGroups:
    """A tensor [B, T, groups, heads, dim], of which each group has the same columns of a product. The code may make
    one dimension of groups and heads, as CodeGen does.
    """

    def __init__(self, packed: Any, sizes: tuple[int, int, int]) -> None:
        self._packed, self._sizes = packed, sizes

    @classmethod
    def of(cls, x: Any, sizes: Any) -> HeadsOfGroups:
        """Take the heads of groups apart. x: a StandIn, [B, T, groups, heads * dim]."""
        groups, heads, dim = sizes
        if not all(type(each) is int and each > 0 for each in sizes) or (groups, heads * dim) != x.shape[2:]:
            raise UntraceableError("it reshapes to another size")
        return cls(x.trace.packed(x), (groups, heads, dim))

    @property
    def shape(self) -> tuple[Any, ...]:
        return (*self._packed.shape[:2], *self._sizes)

    def reshape(self, *sizes: Any) -> Any:
        sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        groups, heads, dim = self._sizes
        if len(sizes) != 4 or sizes[2] not in (-1, groups * heads) or sizes[3] != dim:
            raise UntraceableError("it reshapes in another way than into heads and back")
        return self._packed.view(*sizes)

    view = reshape

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(f"it calls Tensor.{name}")


class SideBySide:
    """A tensor [B, T, parts, heads, dim] that may only be taken apart: Q, K and V of one product.

    dims: as the code has ordered them, without B where it is not there. sizes: of each part, None if it has them.
    whole: all columns, as they were before they were divided; None if the code has ordered them.
    """

    def __init__(
        self, parts: list[Any], sizes: tuple[Any, ...] | None, dims: str = "btphd", whole: Any = None
    ) -> None:
        self._parts, self._dims = tuple(part.view(*sizes) if sizes else part for part in parts), dims
        self._whole = whole

    def __getitem__(self, index: Any) -> Any:
        """Return the numbers with one place in the last dimension but one, where that is Q, K or V of each head."""
        if self._whole is None or not isinstance(index, tuple) or len(index) != 3 or type(index[1]) is not int:
            raise UntraceableError(NO_COLUMNS)
        if index[0] is not ... or index[2] != slice(None):
            raise UntraceableError(NO_COLUMNS)
        _, tokens, count, dim = self._parts[0].shape
        if not -count <= index[1] < count:
            raise UntraceableError(NO_COLUMNS)
        start = index[1] % count * dim
        heads = self._whole.view(BATCH, tokens, len(self._parts), count * dim)
        return heads[..., start : start + dim]

    def with_batch(self, batch: Any) -> SideBySide:
        parts = [part.with_batch(batch) for part in self._parts]
        return SideBySide(parts, None, self._dims if batch is not None else self._dims.replace("b", ""))

    def permute(self, *dims: Any) -> SideBySide:
        if sorted(dims) != [*range(len(self._dims))]:
            raise UntraceableError("it transposes other dimensions than those that a tensor has")
        return SideBySide([*self._parts], None, "".join(self._dims[dim] for dim in dims))

    def unbind(self, dim: Any = 0) -> tuple[Any, ...]:
        rest = self._dims.replace("p", "")
        if self._dims[dim] != "p" or rest not in ("bthd", "bhtd", "thd", "htd"):
            raise UntraceableError("it takes a tensor apart by another dimension than its parts")
        if "ht" in rest:
            return tuple(part.transpose(rest.index("h"), rest.index("t")) for part in self._parts)
        return self._parts

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(f"it calls Tensor.{name}")
