"""Rotations by one complex table, which holds cos + i sin of each pair of neighbours (DeepSeek V2, Llama 4).

A trace records them as rotations by cos and sin, of which each number stands twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..undo.journal import original_class
from .call_form import CACHES, TABLES
from .operation import UntraceableError
from .source import without_renaming
from .stand_ins import StandIn
from .symbols import Opaque

ROTATION_BY_COMPLEX = "apply_rotary_emb"  # the name under which code finds it


class ComplexTable(Opaque):
    """One tensor that has the name of cos and sin. The code may move it to the device of the layer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(TABLES, device=device)

    def to(self, device: Any) -> ComplexTable:
        if device != self.device:
            raise UntraceableError("it moves the table of its rotation to another device")
        return self


def rotates_by_complex(layer: nn.Module) -> bool:
    """Return whether a part of a layer names such a rotation in its code."""
    codes = (getattr(without_renaming(original_class(part).forward), "__code__", None) for part in layer.children())
    return any(code is not None and ROTATION_BY_COMPLEX in code.co_names for code in codes)


def rotate_by_complex(record: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[StandIn, StandIn]:
    """Record the rotation of two tensors of heads; return what the code gets. Raises UntraceableError."""
    known = len(args) == 3 and not kwargs and isinstance(args[2], ComplexTable)
    q, k = args[:2] if known else (None, None)
    known = known and isinstance(q, StandIn) and isinstance(k, StandIn) and q.heads is not None and k.heads is not None
    if not known or q.transposed is not k.transposed or record.given.keys().isdisjoint(CACHES):
        raise UntraceableError("it rotates in a way of its own")
    if q.transposed:
        return record.rotate(by_parts(original, heads_first=True), q, k, *record.tables)  # type: ignore[no-any-return]
    rotated = record.rotate(
        by_parts(original, heads_first=False), q.transpose(1, 2), k.transpose(1, 2), *record.tables
    )
    first, second = (each.transpose(1, 2) for each in rotated)
    return first, second


@lru_cache(maxsize=256)
def by_parts(original: Callable[..., Any], *, heads_first: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return how a function rotates [B, H, T, D] by cos and sin, [B, T, D], in which each number stands twice.

    heads_first: whether it takes [B, H, T, D] itself, else [B, T, H, D].
    """

    def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.complex(cos[..., ::2].float(), sin[..., ::2].float())
        if heads_first:
            return original(q, k, table)  # type: ignore[no-any-return]
        first, second = (each.transpose(1, 2) for each in original(q.transpose(1, 2), k.transpose(1, 2), table))
        return first, second

    return rotation


def cos_and_sin(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [B, T, D], of a complex table [B, T, D / 2]; each number of it stands twice."""
    cos, sin = (each.repeat_interleave(2, -1) for each in (table.real, table.imag))
    return cos, sin
