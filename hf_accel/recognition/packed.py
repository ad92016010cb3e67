"""Stand-ins for sequences that are packed into one row, which code takes apart ahead of attention and joins behind it.

Two sequences stand for all of them: what code does with each of two, it does with each of any number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .call_form import STARTS
from .operation import UntraceableError
from .stand_ins import StandIn
from .symbols import BATCH, TOKENS, Count, Opaque

FIRST, SECOND = Count(), Count()  # the tokens of each of the two


class Starts(Opaque):
    """The places where packed sequences begin, and the end of the last; a part of them; or the lengths."""

    def __init__(self, parts: str = "all") -> None:
        super().__init__(STARTS)
        self.parts = parts

    def __getitem__(self, index: Any) -> Starts:
        bounds = [index.start, index.stop, index.step] if isinstance(index, slice) else []
        if self.parts != "all" or bounds not in ([1, None, None], [None, -1, None]):
            raise UntraceableError(f"it takes other parts of {STARTS} than begins and ends")
        return Starts("ends" if bounds[0] == 1 else "begins")

    def __sub__(self, other: Any) -> Starts:
        if not isinstance(other, Starts) or (self.parts, other.parts) != ("ends", "begins"):
            raise UntraceableError(f"it makes something else of {STARTS} than lengths")
        return Starts("lengths")

    def tolist(self) -> Starts:
        return self

    def split(self, x: StandIn, dim: Any) -> tuple[StandIn, ...]:
        """Take a row apart into sequences of these lengths."""
        known = self.parts == "lengths" and x.batch is not BATCH and x.rows is TOKENS
        if not known or type(dim) is not int or x.shape[dim] is not TOKENS:
            raise UntraceableError("it takes something else apart than the sequences of a row")
        return replace(x, rows=FIRST), replace(x, rows=SECOND)


def joined(sequences: Sequence[Any], dim: Any = 0) -> StandIn:
    """Return the row of the sequences that code has taken apart."""
    parts = [x for x in sequences if isinstance(x, StandIn)]
    known = len(parts) == len(sequences) == 2 and parts[0].rows is FIRST and parts[1].rows is SECOND
    if not known or type(dim) is not int or parts[0].shape[dim] is not FIRST:
        raise UntraceableError("it joins something else than all sequences of a row")
    first, other = (replace(x, rows=TOKENS) for x in parts)
    if vars(first) != vars(other):
        raise UntraceableError("it joins something else than all sequences of a row")
    return first


def is_second(qkv: tuple[Any, Any, Any]) -> bool:
    """Return whether queries, keys and values are those of the second sequence."""
    return all(isinstance(x, StandIn) and x.rows is SECOND for x in qkv)


def attended_again(record: Any, module: Any, qkv: tuple[Any, Any, Any], *options: Any) -> StandIn:
    """Return the result for the second sequence, to which code must attend as it did to the first."""
    recorded, widths = record.operations[-1:], len(record.widths)
    attended: StandIn = record.attend(module, tuple(replace(x, rows=FIRST) for x in qkv), *options)
    outputs = recorded[0].outputs if recorded else []
    if [replace(record.operations.pop(), outputs=outputs)] != recorded:
        raise UntraceableError("it attends in a way of its own")
    del record.widths[widths:]
    return replace(attended, span=outputs[0], rows=SECOND)


def as_row(x: Any) -> Any:
    """Return a stand-in for a sequence as one for a row, within which attention is to all tokens."""
    if isinstance(x, StandIn) and x.rows is FIRST and type(x.batch) is int:
        return replace(x, rows=TOKENS, batch=BATCH)
    return x


def is_packed(x: Any) -> bool:
    """Return whether x stands for a row of sequences, or one of these."""
    return isinstance(x, StandIn) and x.batch is not BATCH


def rotated_row(record: Any, original: Callable[..., Any], q: StandIn, k: Any, *tables: Any, **kwargs: Any) -> Any:
    """Return the rotated queries and keys of a row: [T, H, D], or [1, T, H, D]."""
    if not is_packed(k) or k.batch is not q.batch:
        raise UntraceableError("it rotates in a way of its own")
    heads = [replace(x, batch=BATCH).transpose(1, 2) for x in (q, k)]
    function = rotation_of_tokens(original, in_row=q.batch is not None)
    return tuple(x.transpose(1, 2).with_batch(q.batch) for x in record.rotate(function, *heads, *tables, **kwargs))


@lru_cache(maxsize=256)
def rotation_of_tokens(original: Callable[..., Any], *, in_row: bool) -> Callable[..., Any]:
    """Return a rotation of heads [B, H, T, D] that calls one of the tokens of a row: [T, H, D], or [1, T, H, D] if
    `in_row`, with a row of the tables for each token.
    """

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        tokens = (q.transpose(1, 2), k.transpose(1, 2))
        rows = []
        for row in range(len(q)):
            heads = [x[row : row + 1] if in_row else x[row] for x in tokens]
            rows.append(original(*heads, cos[row], sin[row]))
        join = torch.cat if in_row else torch.stack
        return tuple(join(each).transpose(1, 2) for each in zip(*rows, strict=True))

    return rotate
