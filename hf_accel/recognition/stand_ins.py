"""Stand-ins for the tensors, modules, config and cache of a layer, with which its code runs once to be traced.

A stand-in knows only what is written here. Whatever else the code asks of it raises UntraceableError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from .columns import HeadsOfGroups, SideBySide, columns_of_chunks, even_columns, some_heads, split_of_sizes
from .operation import Span, UntraceableError
from .scores import Scores, TransposedKeys, WideHeads
from .symbols import ALL_TOKENS, BATCH, SOURCE, TOKENS, Count, Opaque, Product, is_shape

ATTENTION = "_attn_implementation"  # the property of a config that names the attention function
ATTENTION_KEPT = f"{ATTENTION}_internal"  # where the config keeps the name


class Recorder(Protocol):
    """The stand-ins ask these things of the trace that made them."""

    dtype: torch.dtype
    device: torch.device
    attention: str | None
    equals: dict[str, str]
    mask: Opaque
    source_mask: Opaque
    bias: Opaque

    @property
    def mask_hides(self) -> bool: ...

    def note(self, owner: Mapping[str, Any], name: str, value: Any) -> None: ...

    def attribute(self, stand_in: ModuleStandIn, module: nn.Module, name: str) -> Any: ...

    def run(
        self, stand_in: ModuleStandIn, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def by_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def convert(self, x: StandIn) -> StandIn: ...

    def packed(self, x: StandIn) -> StandIn: ...

    def add(self, x: Any, y: Any) -> StandIn: ...

    def multiply(self, x: StandIn, other: Any) -> StandIn: ...

    def multiply_in_place(self, x: StandIn, other: Any) -> StandIn: ...

    def add_in_place(self, x: StandIn, other: Any) -> StandIn: ...

    def write(self, key: Any, value: Any, layer_idx: Any) -> tuple[StandIn, StandIn]: ...

    def attend(self, module: Any, qkv: tuple[Any, Any, Any], mask: Any, options: dict[str, Any]) -> StandIn: ...

    def attend_by(self, scores: Scores, value: Any) -> StandIn: ...

    def choose(self, condition: Any, scores: Scores, other: Any) -> Scores: ...

    def keep(self, scores: Scores, kept: Any, others: Any) -> Scores: ...


@dataclass(eq=False)
class StandIn:
    """A tensor [B, T, width], [B * T, width] if it is `flat`, [B, T, heads, dim], or [B, heads, T, dim] if it is
    `transposed`. Where sequences are packed into one row, B is 1, or is not there.

    factor: the number by which it must still be multiplied. cached: whether it came from the cache. rows: what stands
    for T, TOKENS or SOURCE, or another Count for one sequence of a row. apart: the heads that a tensor [B, T, width]
    is made of, if they do not stand end to end. batch: what stands for B, BATCH, 1, or None where it is not there.
    merged: whether it is [B * heads, T, dim] instead of [B, heads, T, dim]. zeros: how many zeros stand behind the
    numbers of each head. wide: whether its numbers are float32, which those of the layer are not.
    """

    trace: Recorder
    span: Span
    width: int
    heads: int | None = None
    transposed: bool = False
    factor: float = 1.0
    cached: bool = False
    flat: bool = False
    rows: Count = field(default_factory=lambda: TOKENS)
    apart: int = 1
    batch: Any = field(default_factory=lambda: BATCH)
    merged: bool = False
    zeros: int = 0
    wide: bool = False

    @property
    def is_whole(self) -> bool:
        """True if it is all columns of a buffer, [B, T, width]."""
        return self.heads is None and self.span.offset == 0 and self.span.stride == self.width

    @property
    def shape(self) -> tuple[Any, ...]:
        if self.flat:
            return ALL_TOKENS, self.width
        batch = () if self.batch is None else (self.batch,)
        if self.heads is None:
            return (*batch, self.rows, self.width)
        dim = self.width // self.heads + self.zeros
        if self.merged:
            return Product(BATCH, self.heads), self.rows, dim
        return (*batch, self.heads, self.rows, dim) if self.transposed else (*batch, self.rows, self.heads, dim)

    def size(self, index: int | None = None) -> Any:
        return self.shape if index is None else self.shape[index]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.wide else self.trace.dtype

    @property
    def device(self) -> torch.device:
        return self.trace.device

    def view(self, *sizes: Any) -> Any:
        sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        if self.batch is not BATCH:
            batch = 1 if len(sizes) > 2 and type(sizes[0]) is int and sizes[0] == 1 else None
            usual = replace(self, batch=BATCH).view(BATCH, *(sizes if batch is None else sizes[1:]))
            return usual.with_batch(batch)
        if self.merged or isinstance(sizes[0], Product) or self.zeros:
            return self._merged(sizes)
        if len(sizes) == 2 or self.flat:
            return self._flattened(*sizes)
        batch, tokens, *rest = sizes
        if self.heads is None and batch is BATCH and type(tokens) is int and [tokens, *rest[1:]] == [1, self.width]:
            if rest[0] is not self.rows:
                raise UntraceableError("it reshapes in another way than into heads and back")
            return replace(self, heads=1, transposed=True)
        if len(rest) == 3 and self.span.head and not self.transposed and tokens is self.rows:
            return HeadsOfGroups.of(self, rest)
        if len(rest) == 3 and self.heads is None and type(rest[0]) is int and rest[0] > 0:
            return SideBySide(self.parts(rest[0]), (batch, tokens, *rest[1:]), whole=self)
        if self.heads == 1 and self.transposed and tokens is self.rows and len(rest) == 2:  # the one head's columns
            return replace(self, heads=None, transposed=False).view(batch, tokens, *rest)
        plain = all(isinstance(size, int) for size in rest) and rest.count(-1) <= 1 <= len(rest) <= 2
        plain = plain and (tokens is self.rows or (tokens == -1 and -1 not in rest))
        if (
            self.span.head
            and not self.transposed
            and batch is BATCH
            and tokens is self.rows
            and self.heads is not None
        ):
            if rest == [-1]:
                return replace(self, heads=None, apart=self.heads)
            if rest in ([-1, self.shape[-1]], [*self.shape[2:]]):
                return self
        if self.transposed and is_shape(sizes, self.shape):
            return self
        if self.transposed or self.span.head or batch is not BATCH or not plain:
            raise UntraceableError("it reshapes in another way than into heads and back")
        known = rest[0] if len(rest) == 1 else -rest[0] * rest[1] if -1 in rest else rest[0] * rest[1]
        if self.width % known if -1 in rest else known != self.width:
            raise UntraceableError("it reshapes to another size")
        if len(rest) == 1:
            return replace(self, heads=None)
        heads = rest[0] if rest[0] != -1 else self.width // rest[1]
        return replace(self, heads=heads)

    reshape = view

    def _merged(self, sizes: tuple[Any, ...]) -> StandIn:
        """Make one dimension of rows and heads, or two again."""
        apart, together = replace(self, merged=False), replace(self, merged=True)
        if self.transposed and not self.zeros:
            if self.merged and is_shape(sizes, apart.shape):
                return apart
            sizes = tuple(self.rows if type(size) is int and size == -1 else size for size in sizes)
            if not self.merged and is_shape(sizes, together.shape):
                return together
        raise UntraceableError("it reshapes in another way than into heads and back")

    def _flattened(self, *sizes: Any) -> StandIn:
        """Join the rows of a pass, or take them apart again."""
        if self.flat and len(sizes) == 3 and sizes[0] is BATCH and sizes[1] is TOKENS and sizes[2] == self.width:
            return replace(self, flat=False)
        whole = not self.flat and self.heads is None and self.rows is TOKENS
        if not whole or type(sizes[0]) is not int or sizes != (-1, self.width):
            raise UntraceableError("it reshapes in another way than into heads and back")
        return replace(self, flat=True)

    def with_batch(self, batch: Any) -> StandIn:
        return replace(self, batch=batch)

    def unsqueeze(self, dim: Any) -> StandIn:
        if dim == 1 and self.heads is None and self.batch is BATCH and not self.flat and self.apart == 1:
            return replace(self, heads=1, transposed=True)
        if dim != 0 or self.batch is not None:
            raise UntraceableError("it adds a dimension that is not that of rows")
        return self.with_batch(1)

    def transpose(self, first: int, second: int) -> Any:
        if self.merged and {first % 3, second % 3} == {1, 2}:
            return TransposedKeys(self)
        before = 0 if self.batch is None else 1  # dimensions that stand before those of heads and tokens
        if self.transposed and {first % 4, second % 4} == {2, 3} and before:
            return TransposedKeys(self)
        if {first, second} != {before, before + 1} or self.heads is None or self.merged:
            raise UntraceableError("it transposes other dimensions than heads and tokens")
        return replace(self, transposed=not self.transposed)

    def permute(self, *dims: Any) -> Any:
        if self.batch is None or (dims[0] if len(dims) == 1 else dims) not in ((0, 2, 1, 3), [0, 2, 1, 3]):
            raise UntraceableError("it transposes other dimensions than heads and tokens")
        return self.transpose(1, 2)

    def contiguous(self) -> StandIn:
        return self

    def __matmul__(self, other: Any) -> Scores:
        if not isinstance(other, TransposedKeys):
            raise UntraceableError("it multiplies tensors that are not queries and keys")
        return other.times(self)

    def scores_of(self, query: Any) -> Scores:
        """Return the scores of queries and these keys."""
        if not isinstance(query, StandIn) or not query.transposed or self.heads not in (1, query.heads):
            raise UntraceableError("it multiplies tensors that are not queries and keys")
        if query.merged is not self.merged or query.zeros or self.zeros:
            raise UntraceableError("it multiplies tensors that are not queries and keys")
        return Scores(self.trace, query, self, self.trace.source_mask if self.rows is SOURCE else self.trace.mask)

    def to(self, dtype: Any) -> StandIn:
        if dtype is self.dtype:
            return self
        if dtype is not torch.float32 and dtype is not self.trace.dtype:
            raise UntraceableError("it computes in another dtype")
        if self.transposed and not self.wide:
            return WideHeads(self)  # type: ignore[return-value]
        return self.trace.convert(self)

    def parts(self, count: int) -> list[StandIn]:
        """Columns side by side, of one width; those of each head if it has heads."""
        return even_columns(self, count)

    def chunk(self, chunks: Any, dim: Any = 0) -> tuple[StandIn, ...]:
        return columns_of_chunks(self, chunks, dim)

    def split(self, size: Any, dim: Any = 0) -> tuple[StandIn, ...]:
        return split_of_sizes(self, size, dim)

    def padded(self, sizes: Any) -> StandIn:
        """Return the tensor with zeros behind the numbers of each head. sizes: how many before and behind them."""
        known = type(sizes) in (tuple, list) and len(sizes) == 2 and sizes[0] == 0 and type(sizes[1]) is int
        if not known or sizes[1] < 1 or self.zeros or self.heads is None or self.merged:
            raise UntraceableError("it calls pad")
        return replace(self, zeros=sizes[1])

    def __getitem__(self, index: Any) -> StandIn:
        if self.zeros and index == (..., slice(None, -self.zeros)):
            return replace(self, zeros=0)
        if self.zeros or self.merged:
            raise UntraceableError("it takes other parts of a tensor than columns")
        if type(index) is tuple and len(index) > 2 and index[:-1] == (slice(None),) * (len(self.shape) - 1):
            index = (..., index[-1])
        match index:
            case (first, slice(step=None) as columns) if first is ... and not self.cached and self.apart == 1:
                heads = self.heads or 1
                size, head = self.width // heads, 0 if heads == 1 else self.span.head or self.width // heads
                start, stop, _ = columns.indices(size)
                span = Span(self.span.buffer, self.span.offset + start, self.span.stride, head)
                return replace(self, span=span, width=max(0, stop - start) * heads)
            case (first, columns, slice(start=None, stop=None, step=None)) if first is ... and self.heads:
                some: StandIn = some_heads(self, columns)
                return some
        raise UntraceableError("it takes other parts of a tensor than columns")

    def __add__(self, other: Any) -> StandIn:
        return self.trace.add(self, other)

    def __mul__(self, other: Any) -> StandIn:
        if type(other) not in (int, float):
            return self.trace.multiply(self, other)
        if self.factor != 1:
            raise UntraceableError("it multiplies by more than a number")
        return replace(self, factor=float(other))

    __rmul__ = __mul__
    __iter__ = None  # transformers' outputs ask whether a value is iterable

    def __iadd__(self, other: Any) -> StandIn:
        return self.trace.add_in_place(self, other)

    def __imul__(self, other: Any) -> StandIn:
        return self.trace.multiply_in_place(self, other)

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(f"it calls Tensor.{name}")

    def __bool__(self) -> bool:
        raise UntraceableError("it looks at the numbers of a tensor")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # a tensor, or a list of tensors, and then another
        first = args[0] if args and isinstance(args[0], (tuple, list)) else args[:2]
        x = next((each for each in first if isinstance(each, cls)), None)
        if x is None:
            raise UntraceableError(f"it calls {getattr(function, '__name__', function)}")
        return x.trace.by_function(function, args, kwargs or {})

    def attended(self, module: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[StandIn, None]:
        """Return the result of the attention function for a query that is a stand-in."""
        return self.trace.attend(module, (self, key, value), mask, options), None


class ModuleStandIn:
    """A module whose code runs with stand-ins. The attributes that it reads of itself are noted."""

    forward = None  # transformers' checkpointing compares it with its own

    def __init__(self, trace: Recorder, module: nn.Module) -> None:
        vars(self).update(_trace=trace, _module=module)

    def __getattr__(self, name: str) -> Any:
        return self._trace.attribute(self, self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UntraceableError(f"it sets its own {name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._trace.run(self, self._module, args, kwargs)


def require(x: Any, *, heads: bool, flat: bool = True) -> None:
    """Check the form of x. heads: whether it must be [B, heads, T, dim], else [B, T, width]. flat: whether [B * T,
    width] will do as well.
    """
    known = isinstance(x, StandIn) and x.factor == 1 and (flat or not x.flat) and x.apart == 1 and not x.wide
    known = known and (x.rows is TOKENS or x.rows is SOURCE) and not (x.merged or x.zeros)
    if not known or x.transposed is not heads or (x.heads is not None) is not heads:
        raise UntraceableError("its tensors have another layout")
