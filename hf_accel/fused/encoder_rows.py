"""The rows of a padded batch that an encoder layer computes: the tokens end to end, or all places of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.cpu.library import threads
from ..kernels.layouts import Ragged
from ..recognition.known_module import PositionRows
from ..tensors import PLAIN, integers

Tables = tuple[Tensor, Tensor]  # cos and sin

# The tokens of a native call for each thread, unless one sequence has more: its memory stays in the caches.
CALL_TOKENS = 256


class Bias(NamedTuple):
    """A bias that is added to scores by the places of query and key: as it was given, and as float32 [heads, T, T]."""

    given: Tensor
    table: Tensor


class CallRows(NamedTuple):
    """The rows of one native call. starts: the [n + 1] places where its sequences begin, int32.

    lengths: the keys of each sequence, [n] int32, which are its first ones; None if every row is a key.
    """

    rows: slice
    starts: Tensor
    lengths: Tensor | None


class WrittenRows(NamedTuple):
    """The keys and the values of a batch, [B, heads, T, dim], zeros at padding; slots: the places of tokens, [N]."""

    k: Tensor
    v: Tensor
    slots: Tensor


class CallTensors(NamedTuple):
    """The tensors of a call that are not its rows: cos and sin, a bias of scores, memory for keys and values, and
    positions.
    """

    tables: Tables | None = None
    bias: Bias | None = None
    written: WrittenRows | None = None
    positions: PositionRows | None = None


NOTHING = CallTensors()


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The places of a padded batch [B, T] that hold tokens: at least one in each row.

    index: of the rows among B * T places, int64; None if every place is a row. ragged: the sequences, end to end.
    calls: parts of them for one native call each. keys: the rows that are keys, int64; None for all of them. packed:
    whether the rows are sequences side by side, of which each token has its row of cos and sin. in_rows: whether the
    states are [B, T, width], else [T, width].
    """

    shape: tuple[int, int]
    index: Tensor | None
    ragged: Ragged
    calls: tuple[CallRows, ...]
    keys: Tensor | None = None
    packed: bool = False
    in_rows: bool = True

    def rows(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [N, width], contiguous: the tokens end to end."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()  # a view of one row may have other strides
        return flat if self.index is None else flat.index_select(0, self.index)

    def padded(self, rows: Tensor) -> Tensor:
        """[N, width] -> [B, T, width], with zeros at padding."""
        if self.index is None:
            return rows.view(*self.shape, -1) if self.in_rows else rows
        out = rows.new_zeros(self.shape[0] * self.shape[1], rows.shape[1])
        return out.index_copy_(0, self.index, rows).view(*self.shape, -1)

    def keys_of(self, rows: Tensor) -> Tensor:
        """[N, ...] -> [M, ...]: the rows that are keys."""
        return rows if self.keys is None else rows.index_select(0, self.keys)

    def shows(self, mask: Any) -> bool:
        """Return whether a mask [B, T] is true at the tokens of the layout, and nowhere else."""
        if type(mask) not in PLAIN or not mask.is_cpu or mask.shape != self.shape:
            return False
        found = mask.bool().flatten()
        index = self.index if self.keys is None else self.keys
        if index is None:
            return bool(found.all())
        return torch.equal(found.nonzero().squeeze(1), index)

    def ends_with_padding(self) -> bool:
        """Return whether all padding is on the right of its row, so that a token has its place among the tokens."""
        if self.index is None:
            return True
        real = torch.arange(self.shape[1], device="cpu") < self.ragged.kv_len[:, None]
        return torch.equal(real.flatten().nonzero().squeeze(1), self.index)

    def with_padding(self) -> RowLayout | None:
        """Return the layout in which padding is computed too, as stock does: its queries see the keys of tokens.

        None if padding is elsewhere than on the right.
        """
        if self.index is None:
            return self
        (batch, tokens), lengths = self.shape, self.ragged.kv_len
        if not self.ends_with_padding():
            return None
        starts = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device="cpu")
        most, calls = max(1, CALL_TOKENS * threads() // tokens), []
        for first in range(0, batch, most):
            end = min(first + most, batch)
            calls.append(CallRows(slice(first * tokens, end * tokens), starts[: end - first + 1], lengths[first:end]))
        ragged = Ragged(starts, lengths, tokens, self.ragged.max_kv)
        return RowLayout(self.shape, None, ragged, tuple(calls), self.index)

    def to_write(self, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> WrittenRows:
        """Return memory for the keys and the values, of these sizes, of all tokens."""
        batch, tokens = self.shape
        make = torch.empty if self.index is None else torch.zeros
        k, v = (make(batch, heads, tokens, dim, dtype=dtype, device="cpu") for dim in dims)
        slots = torch.arange(batch * tokens, device="cpu") if self.index is None else self.index
        return WrittenRows(k, v, slots)

    def tables(self, tables: Tables, *, of_last: bool = False) -> Tables | None:
        """[B or 1, T, dim] -> [N, dim]: of the places of the tokens; None for tables of another form.

        of_last: whether they are [P, dim], of the last P tokens; the others get those of no rotation.
        """
        cos, sin = tables
        if of_last:
            ahead = self.shape[1] - len(cos)
            if cos.ndim != 2 or sin.shape != cos.shape or ahead < 0 or self.packed:
                return None
            cos, sin = (F.pad(each, (0, 0, ahead, 0), value=one)[None] for each, one in ((cos, 1.0), (sin, 0.0)))
        if self.packed:
            if cos.ndim != 2:
                return None
            cos, sin = cos[None], sin[None]
        shapes = [(batch, self.shape[1], cos.shape[-1]) for batch in (1, self.shape[0])]
        if cos.shape not in shapes or sin.shape != cos.shape or sin.dtype is not cos.dtype:
            return None
        if not all(type(each) in PLAIN and each.is_cpu for each in tables):
            return None
        cos, sin = (self.rows(each.expand(self.shape[0], -1, -1)).contiguous() for each in (cos, sin))
        return cos, sin

    def distances(self, positions: Any) -> Tensor | None:
        """Return positions [1, T, T] by the distance of two tokens of a sequence, int64 [2 M - 1]; None if they are no
        odd function of it.
        """
        tokens, most = self.shape[1], self.ragged.max_q
        if type(positions) not in PLAIN or not positions.is_cpu or positions.is_floating_point():
            return None
        if positions.shape != (1, tokens, tokens) or not self.ends_with_padding():
            return None
        found = torch.cat([positions[0, 0].flip(0), positions[0, 1:, 0]])
        places = torch.arange(tokens)
        by_distance = torch.equal(found[tokens - 1 + places[:, None] - places], positions[0])
        if not by_distance or bool((found + found.flip(0)).any()):
            return None
        return found[tokens - most : tokens - 1 + most].long()

    def bias(self, given: Any, heads: int) -> Bias | None:
        """Return the bias [1 or B, heads, T, T] of the rows' scores; None for one of another form, or by rows."""
        batch, tokens = self.shape
        if type(given) not in PLAIN or not given.is_cpu or not given.is_floating_point():
            return None
        if given.shape not in [(rows, heads, tokens, tokens) for rows in (1, batch)] or not self.ends_with_padding():
            return None
        first = given[:1]
        if len(given) > 1 and given.stride(0) and not bool((given == first).all()):
            return None
        return Bias(given, first[0].float().contiguous())


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


def packed_layout(starts: Any, shape: tuple[int, int], *, in_rows: bool) -> RowLayout | None:
    """Return the layout of sequences that are packed into one row; None for places that do not divide it.

    starts: where they begin, and the end of the last, a tensor of integers.
    """
    if type(starts) not in PLAIN or starts.ndim != 1 or not starts.is_cpu or starts.is_floating_point():
        return None
    places: list[int] = starts.tolist()
    lengths = [end - begin for begin, end in pairwise(places)]
    if shape[0] != 1 or places[:1] != [0] or places[-1] != shape[1] or min(lengths, default=-1) < 0:
        return None
    return replace(_layout(shape, None, [each for each in lengths if each]), packed=True, in_rows=in_rows)


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
        CallRows(
            slice(starts[first], starts[end]),
            begins if not first and end == len(lengths) else begins[first : end + 1] - starts[first],
            None,
        )
        for first, end in pairwise(_ends(starts))
    ]
    return RowLayout(shape, index, ragged, tuple(calls))


def _ends(starts: list[int]) -> Iterator[int]:
    """The sequences at which a native call ends, and the next one begins."""
    yield 0
    begin, most = 0, CALL_TOKENS * threads()
    for sequence in range(1, len(starts) - 1):
        if starts[sequence + 1] - starts[begin] > most:
            yield sequence
            begin = sequence
    yield len(starts) - 1
