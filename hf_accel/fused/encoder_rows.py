"""The rows of a batch of sequences: which of its places hold tokens, by the mask of attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.layouts import Ragged
from ..tensors import PLAIN, integers

Tables = tuple[Tensor, Tensor]  # cos and sin

# The tokens of a native call, unless one sequence has more: its memory stays in the caches.
CALL_TOKENS = 1024


class WrittenRows(NamedTuple):
    """The keys and the values of a batch, [B, heads, T, dim], zeros at padding; slots: the places of tokens, [N]."""

    k: Tensor
    v: Tensor
    slots: Tensor


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The places of a padded batch [B, T] that hold tokens: at least one in each row, which begins with one.

    index: of the tokens among B * T places, int64; None if there is no padding. ragged: the sequences, end to end.
    calls: parts of them for one native call each, as rows and as the [n + 1] places where sequences begin, int32.
    """

    shape: tuple[int, int]
    index: Tensor | None
    ragged: Ragged
    calls: tuple[tuple[slice, Tensor], ...]

    def rows(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [N, width], contiguous: the tokens end to end."""
        flat = x.reshape(-1, x.shape[-1])
        return flat if self.index is None else flat.index_select(0, self.index)

    def padded(self, rows: Tensor) -> Tensor:
        """[N, width] -> [B, T, width], with zeros at padding."""
        if self.index is None:
            return rows.view(*self.shape, -1)
        out = rows.new_zeros(self.shape[0] * self.shape[1], rows.shape[1])
        return out.index_copy_(0, self.index, rows).view(*self.shape, -1)

    def to_write(self, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> WrittenRows:
        """Return memory for the keys and the values, of these sizes, of all tokens."""
        batch, tokens = self.shape
        make = torch.empty if self.index is None else torch.zeros
        k, v = (make(batch, heads, tokens, dim, dtype=dtype) for dim in dims)
        return WrittenRows(k, v, torch.arange(batch * tokens) if self.index is None else self.index)

    def tables(self, tables: Tables) -> Tables | None:
        """[B or 1, T, dim] -> [N, dim]: of the places of the tokens; None for tables of another form."""
        cos, sin = tables
        shapes = [(batch, self.shape[1], cos.shape[-1]) for batch in (1, self.shape[0])]
        if cos.shape not in shapes or sin.shape != cos.shape or sin.dtype is not cos.dtype:
            return None
        if not all(type(each) in PLAIN and each.is_cpu for each in tables):
            return None
        cos, sin = (self.rows(each.expand(self.shape[0], -1, -1)).contiguous() for each in tables)
        return cos, sin


def windowed_layout(mask: Tensor | None, batch: int, tokens: int, window: int) -> RowLayout | None:
    """Return the layout of a batch whose queries see the keys at a distance of less than `window`, on both sides.

    The mask must say so of each query that is no padding, [B or 1, 1, T, T]. Padding must be on the right, because it
    counts in distances. If no token is as far from another, it is a mask as that of `layout_of`.
    """
    if tokens <= window:
        return layout_of(mask, batch, tokens)
    if type(mask) not in PLAIN or mask.ndim != 4 or not mask.is_cpu:  # type: ignore[union-attr]
        return None
    assert mask is not None
    if mask.shape[0] not in (1, batch) or mask.shape[1:] != (1, tokens, tokens):
        return None
    columns = mask[:, 0].diagonal(dim1=1, dim2=2)  # a token sees itself
    layout = layout_of(columns[:, None, None], batch, tokens)
    seen = _seen(mask[:, 0])
    if layout is None or seen is None:
        return None
    real = seen.diagonal(dim1=1, dim2=2)
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        return None
    places = torch.arange(tokens)
    near = (places[:, None] - places).abs() < window
    agrees = (seen == (real[:, None, :] & near)) | ~real[:, :, None]
    return layout if bool(agrees.all()) else None


def _seen(mask: Tensor) -> Tensor | None:
    """Return which keys a mask shows, as bool; None if its numbers do more than show and hide them."""
    if mask.dtype is torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    seen = mask == 0
    return seen if bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()) else None


def layout_of(mask: Tensor | None, batch: int, tokens: int) -> RowLayout | None:
    """Return the layout of a batch whose attention has this mask; None for a mask that does not say which are padding.

    mask: None, or [B or 1, 1, T or 1, T]: bool, or numbers that are added to scores. All queries must see the same
    keys, and the first token of each row, which models read for the whole row.
    """
    if mask is None:
        return _layout((batch, tokens), None, [tokens] * batch)
    if type(mask) not in PLAIN or mask.ndim != 4 or not mask.is_cpu:
        return None
    rows, heads, queries, keys = mask.shape
    if rows not in (1, batch) or heads != 1 or queries not in (1, tokens) or keys != tokens:
        return None
    columns = mask[:, 0, 0]
    if queries > 1 and mask.stride(2) and not bool((mask == mask[:, :, :1]).all()):
        return None
    seen = _seen(columns)
    if seen is None:
        return None
    columns = seen.expand(batch, tokens)
    return layout_of_columns(columns) if bool(columns[:, 0].all()) else None


def layout_of_columns(columns: Tensor) -> RowLayout | None:
    """Return the layout of a batch of which these places hold tokens, bool [B, T]; None if a row holds none."""
    batch, tokens = columns.shape
    lengths: list[int] = columns.sum(1).tolist()
    if min(lengths) == tokens:
        return _layout((batch, tokens), None, lengths)
    if not min(lengths):
        return None
    return _layout((batch, tokens), columns.flatten().nonzero().squeeze(1), lengths)


def causal_layout(
    columns: Tensor, batch: int, tokens: int, window: int | None, *, first_counts: bool = False
) -> RowLayout | None:
    """Return the layout of a batch whose queries see the tokens up to their own, the last `window` of them, or all.

    columns: bool [B or 1, T], which places hold tokens. They must stand side by side within a window, because padding
    between them counts in distances. first_counts: whether the first place of each row must hold a token, because
    models read it; decoders read the last one.
    """
    if columns.shape[0] not in (1, batch) or columns.shape[1] != tokens or not columns.is_cpu:
        return None
    columns = columns.expand(batch, tokens).bool()
    if first_counts and not bool(columns[:, 0].all()):
        return None
    if window is not None and window < tokens:
        begins = columns[:, 0] + (columns[:, 1:] & ~columns[:, :-1]).sum(1)
        if bool((begins > 1).any()):
            return None
    return layout_of_columns(columns)


def _layout(shape: tuple[int, int], index: Tensor | None, lengths: list[int]) -> RowLayout:
    starts = [0, *accumulate(lengths)]
    longest, begins = max(lengths), integers(starts, dtype=torch.int32)
    ragged = Ragged(begins, integers(lengths, dtype=torch.int32), longest, longest)
    calls = [
        (
            slice(starts[first], starts[end]),
            begins if not first and end == len(lengths) else begins[first : end + 1] - starts[first],
        )
        for first, end in pairwise(_ends(starts))
    ]
    return RowLayout(shape, index, ragged, tuple(calls))


def _ends(starts: list[int]) -> Iterator[int]:
    """The sequences at which a native call ends, and the next one begins."""
    yield 0
    begin = 0
    for sequence in range(1, len(starts) - 1):
        if starts[sequence + 1] - starts[begin] > CALL_TOKENS:
            yield sequence
            begin = sequence
    yield len(starts) - 1
