"""The record of a rotation, and the forms in which code calls one: of queries and keys together or of one tensor, and
with tables of all numbers of a head or of half of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call_form import as_usual
from .operation import Operation, UntraceableError
from .packed import is_packed, rotated_row
from .position_tables import OwnTables, TableRows, own_tables
from .scores import WideHeads
from .stand_ins import StandIn, require
from .trial import RandomNumbers, Tolerance, agree

Rotation = Callable[..., tuple[Tensor, Tensor]]
OF_ONE = ("x", "cos", "sin")  # the first parameters of code that rotates one tensor
TABLES_OF_HALF = ("cos", "sin")  # of code that rotates one tensor [B, T, H, D] by tables [B, T, D / 2], in any order


class CalledRotation(NamedTuple):
    """A rotation as it is called. function: the same of q, k, cos and sin, [B, H, T, D] and [B, T, D], with tables of
    all numbers of a head. half_tables: whether the code is given tables of half as many numbers, as gpt-oss does.
    """

    function: Rotation
    half_tables: bool = False


@lru_cache(maxsize=256)
def rotation_of_two(original: Rotation) -> CalledRotation:
    """Return how code that rotates queries and keys together is called."""
    numbers = RandomNumbers()
    q, k = (numbers(2, heads, 5, 16) for heads in (6, 2))
    cos, sin = (numbers(2, 5, 8) for _ in range(2))

    def halves(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

    near = Tolerance(absolute=1e-5)
    if not agree(lambda: original(q, k, cos, sin), lambda: (halves(q), halves(k)), near):
        return CalledRotation(original)

    def of_whole_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        half = cos.shape[-1] // 2
        return original(q, k, cos[..., :half], sin[..., :half])

    return CalledRotation(of_whole_tables, half_tables=True)


@lru_cache(maxsize=256)
def rotation_of_one(original: Callable[..., Tensor]) -> CalledRotation | None:
    """Return how code that rotates one tensor is called, as Gemma 4 does; None for any other.

    Such code takes the dimension of heads too, 1 or 2, and gives the same for both.
    """
    parameters = tuple(inspect.signature(original).parameters)
    if parameters != (*OF_ONE, "unsqueeze_dim"):
        return None
    numbers = RandomNumbers()
    x, cos, sin = numbers(2, 6, 5, 16), numbers(2, 5, 16), numbers(2, 5, 16)
    by_tokens: Callable[[], Any] = lambda: original(x.transpose(1, 2), cos, sin, unsqueeze_dim=2).transpose(1, 2)  # noqa: E731
    if not agree(lambda: original(x, cos, sin, unsqueeze_dim=1), by_tokens):
        return None

    def of_two(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return original(q, cos, sin, unsqueeze_dim=1), original(k, cos, sin, unsqueeze_dim=1)

    return CalledRotation(of_two)


@lru_cache(maxsize=256)
def rotation_by_half(original: Callable[..., Tensor]) -> CalledRotation | None:
    """Return how code is called that rotates one tensor [B, T, H, D] by tables of half a head, as GPT-J does; None for
    any other. Where tables are wider, what it gives is rounded: see WideHeads.
    """
    names = tuple(inspect.signature(original).parameters)[1:]
    if tuple(sorted(names)) != TABLES_OF_HALF:
        return None

    def of_two(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        half = cos.shape[-1] // 2
        tables = {"cos": cos[..., :half], "sin": sin[..., :half]}
        first, second = (
            original(x.transpose(1, 2), *(tables[name] for name in names)).transpose(1, 2).to(x.dtype) for x in (q, k)
        )
        return first, second

    return CalledRotation(of_two)


def rotate(record: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a rotation of queries and keys, or of one tensor; return what the code does. record: a Record."""
    if len(args) == 3:
        return _rotated_one(record, original, *args, **kwargs)
    if len(args) != 4 or not as_usual(original, kwargs) or (args[2], args[3]) != record.tables:
        raise UntraceableError("it rotates in a way of its own")
    q, k = args[:2]
    if is_packed(q):
        return rotated_row(record, original, *args, **kwargs)
    k = record.multiplied(k)
    factor = getattr(q, "factor", 1.0)  # of queries that are scaled ahead of the rotation
    q = replace(q, factor=1.0) if factor != 1 else q
    for x in (q, k):
        require(x, heads=True)
    if q.shape[3] != k.shape[3]:
        raise UntraceableError("queries and keys have heads of different sizes")
    q_out, k_out = _recorded(record, rotation_of_two(original), [q, k])
    return replace(q_out, factor=factor), k_out


def _rotated_one(record: Any, original: Any, x: Any, *tables: Any, unsqueeze_dim: int = 1) -> StandIn | WideHeads:
    """Record the rotation of one tensor, [B, H, T, D], or [B, T, H, D] if unsqueeze_dim is 2."""
    if any(isinstance(each, TableRows) for each in tables):
        return _rotated_by_own(record, original, x, *tables)
    known, by_tokens = rotation_of_one(original), unsqueeze_dim == 2
    if known is None or tables != record.tables or unsqueeze_dim not in (1, 2) or not isinstance(x, StandIn):
        raise UntraceableError("it rotates in a way of its own")
    if by_tokens is x.transposed:
        raise UntraceableError("it rotates in a way of its own")
    require(replace(x, transposed=True), heads=True)
    (rotated,) = _recorded(record, known, [replace(x, transposed=True)])
    return replace(rotated, transposed=not by_tokens)


def _rotated_by_own(record: Any, original: Any, x: Any, *given: Any) -> StandIn | WideHeads:
    """Record the rotation of one tensor [B, T, H, D] by rows of a table that the module keeps."""
    known = rotation_by_half(original)
    if known is None or len(given) != 2 or record.device.type != "cpu" or not isinstance(x, StandIn) or x.transposed:
        raise UntraceableError("it rotates in a way of its own")
    named = dict(zip(tuple(inspect.signature(original).parameters)[1:], given, strict=True))
    tables = own_tables(named["cos"], named["sin"])
    require(replace(x, transposed=True), heads=True)
    if 2 * tables.size != x.shape[3] or x.cached:
        raise UntraceableError("its cos and sin have another size than half of what it rotates")
    _refuse_other_tables(record, tables)
    values = {
        "function": known.function, "heads": x.heads, "kv_heads": 0, "dim": x.shape[3], "partial": False,
        "half_tables": False, "tables": tables,
    }  # fmt: skip
    rotated: StandIn = record.put("rope", [x], x.width, **values)
    made = torch.promote_types(record.dtype, tables.dtype)
    if made is record.dtype:
        return rotated
    if made is not torch.float32 or tables.dtype is not made:
        raise UntraceableError("it computes in another dtype")
    return WideHeads(rotated)


def _refuse_other_tables(record: Any, tables: OwnTables | None) -> None:
    """Raise UntraceableError if the code has rotated by other tables. tables: None for those that it is given."""
    for known in (each.values.get("tables") for each in record.operations if each.kind == "rope"):
        if known is not tables and (known is None or tables is None or not tables.are(known)):
            raise UntraceableError("it rotates by several tables")


def _recorded(record: Any, known: CalledRotation, tensors: list[StandIn]) -> list[StandIn]:
    """Record a rotation of tensors [B, H, T, D]: queries and keys, or one of them."""
    if any(x.cached for x in tensors):
        raise UntraceableError("it rotates what comes from the cache")
    dim: int = tensors[0].shape[3]
    size = record.table_size or dim
    if known.half_tables:  # a plan does not know their size
        if size not in (dim // 2, dim):
            raise UntraceableError("its cos and sin have another size than half a head")
        size = dim
    if size > dim:
        raise UntraceableError("its cos and sin have more numbers than a head")
    _refuse_other_tables(record, None)
    rotated = [x if size == dim else x[..., :size] for x in tensors]
    outs = [record.buffer(x.width) for x in rotated]
    heads = [*(x.heads for x in tensors), 0][:2]
    values = {
        "function": known.function, "heads": heads[0], "kv_heads": heads[1], "dim": size, "partial": size < dim,
        "half_tables": known.half_tables,
    }  # fmt: skip
    record.operations.append(Operation("rope", [x.span for x in rotated], outs, values=values))
    made = [replace(x, span=out) for x, out in zip(rotated, outs, strict=True)]
    if size < dim:
        made = [record.join(one, x[..., size:]) for one, x in zip(made, tensors, strict=True)]
    return made
