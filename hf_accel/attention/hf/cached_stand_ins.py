"""Stand-ins for the keys and values that code takes from a cache, and for its mask. See operator_pass.py."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from ...kernels.layouts import KV
from ...recognition.operation import UntraceableError
from ...recognition.scores import Scores, TransposedKeys


class CachePass(Protocol):
    """The stand-ins of keys and values ask these things of the pass that they belong to.

    columns: the number of keys that code reads. dtype: of attention.
    """

    columns: int
    dtype: torch.dtype
    mask_hides: bool
    mask: Any
    bias: Any

    def attend_by(self, scores: Scores, values: Any) -> Any: ...

    def choose(self, condition: Any, scores: Scores, other: Any) -> Scores: ...

    def keep(self, scores: Scores, kept: Tensor, others: Tensor) -> Scores: ...

    def attend_as_sdpa(self, query: Tensor, keys: Any, values: Any, **given: Any) -> Tensor: ...

    def attend_as_interface(self, module: nn.Module, query: Tensor, kv: KV, mask: Any, **given: Any) -> Tensor: ...


class HidingMask:
    """Stands for the mask of causal attention, which hides what comes behind a query. like: the one that was given."""

    def __init__(self, like: Tensor | None = None) -> None:
        self.shape = torch.Size() if like is None else like.shape

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, index: Any) -> HidingMask:
        return self

    def to(self, *args: Any, **kwargs: Any) -> HidingMask:
        return self

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented  # the keys or the scores that it is given with know what is meant

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UntraceableError(f"it reads {name} of its mask")


class Cached:
    """Keys or values that came out of the cache, of which code may only change the shape, the dtype and the heads.

    They are [1, heads, one, dim], or [heads, one, dim] if they are `flat`. heads: for each of these, the head of the
    cache that it is.
    """

    def __init__(
        self, own: CachePass, tensor: Tensor, *, flat: bool = False, heads: tuple[int, ...] | None = None
    ) -> None:
        self.own, self.tensor, self.dtype, self.device = own, tensor, tensor.dtype, tensor.device
        self.flat = flat
        self.heads = tuple(range(tensor.shape[1])) if heads is None else heads

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = (1, len(self.heads), self.own.columns, self.tensor.shape[-1])
        return sizes[1:] if self.flat else sizes

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def view(self, *sizes: Any) -> Cached:
        count = len(sizes[0] if len(sizes) == 1 else sizes)
        if count not in (3, 4):
            raise UntraceableError("it reshapes keys or values in another way than into heads")
        return type(self)(self.own, self.tensor, flat=count == 3, heads=self.heads)

    reshape = view

    def contiguous(self) -> Cached:
        return self

    def repeat(self, *counts: int) -> Cached:
        if self.flat or len(counts) != 4 or (counts[0], *counts[2:]) != (1, 1, 1):
            raise UntraceableError("it repeats something else than heads")
        return type(self)(self.own, self.tensor, heads=self.heads * counts[1])

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Cached, ...]:
        count, rest = divmod(len(self.heads), chunks)
        if self.flat or dim not in (1, -3) or rest:
            raise UntraceableError("it cuts something else than heads")
        parts = (self.heads[first : first + count] for first in range(0, len(self.heads), count))
        return tuple(type(self)(self.own, self.tensor, heads=part) for part in parts)

    def to(self, dtype: Any) -> Cached:
        if dtype not in (self.own.dtype, torch.float32):
            raise UntraceableError("it computes in another dtype")
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UntraceableError(f"it calls Tensor.{name}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.chunk and args and isinstance(args[0], cls):
            return args[0].chunk(*args[1:], **(kwargs or {}))
        raise UntraceableError(f"it calls {getattr(function, '__name__', function)}")


class CachedKeys(Cached):
    """The keys, which code may transpose and multiply queries by, or hand to a function that attends."""

    def transpose(self, first: int, second: int) -> TransposedKeys:
        if {first, second} not in ({-1, -2}, {1, 2}, {2, 3}):
            raise UntraceableError("it transposes other dimensions than tokens and numbers")
        return TransposedKeys(self)

    def scores_of(self, query: Any) -> Scores:
        return Scores(self.own, query, self)

    def attended(self, module: nn.Module, query: Tensor, values: Any, mask: Any, **given: Any) -> tuple[Tensor, None]:
        """Attend as a function of transformers' AttentionInterface; returns [1, N, Hq, Dv] and no weights."""
        return self.own.attend_as_interface(module, query, KV(self, values), mask, **given), None  # type: ignore[arg-type]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.scaled_dot_product_attention and len(args) == 3 and isinstance(args[1], cls):
            return args[1].own.attend_as_sdpa(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


class CachedValues(Cached):
    """The values, which code may multiply by weights."""


class CachedLayer(NamedTuple):
    """Stand-ins for the keys and values of a layer in the cache of an encoder's output."""

    keys: CachedKeys
    values: CachedValues


class BothPasses(EncoderDecoderCache):
    """A cache for one call of a module that attends to tokens or to an encoder's output."""

    def __init__(self, tokens: CachePass, source: CachePass, is_updated: dict[int, bool]) -> None:
        # super().__init__() is not called: it asks a cache of transformers how long each layer is.
        self.self_attention_cache: Any = tokens
        self.cross_attention_cache: Any = source
        self.is_updated = is_updated
