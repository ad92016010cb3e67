"""The columns into which code divides what stands for a tensor, or those of each head."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from .operation import UntraceableError
from .symbols import Opaque

OTHER_PARTS = "it divides a tensor into other parts than columns"


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
