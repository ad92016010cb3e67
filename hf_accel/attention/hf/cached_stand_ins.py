"""Stand-ins for the keys and values that code takes from a cache, and for its mask. See operator_pass.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

    def attend_in_part(
        self, query: Tensor, kv: Any, mask: Any, *, scaling: float | None = None, **given: Any
    ) -> tuple[Tensor, Tensor]: ...


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
    cache that it is. zeros: how many follow the numbers of a head.
    """

    def __init__(
        self, own: CachePass, tensor: Tensor, *, flat: bool = False, heads: tuple[int, ...] | None = None,
        zeros: int = 0,
    ) -> None:  # fmt: skip
        self.own, self.tensor, self.dtype, self.device = own, tensor, tensor.dtype, tensor.device
        self.flat, self.zeros = flat, zeros
        self.heads = tuple(range(tensor.shape[1])) if heads is None else heads

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = (1, len(self.heads), self.own.columns, self.tensor.shape[-1] + self.zeros)
        return sizes[1:] if self.flat else sizes

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def view(self, *sizes: Any) -> Cached:
        count = len(sizes[0] if len(sizes) == 1 else sizes)
        if count not in (3, 4) or self.zeros:
            raise UntraceableError("it reshapes keys or values in another way than into heads")
        return type(self)(self.own, self.tensor, flat=count == 3, heads=self.heads)

    reshape = view

    def contiguous(self) -> Cached:
        return self

    def repeat(self, *counts: int) -> Cached:
        if self.flat or self.zeros or len(counts) != 4 or (counts[0], *counts[2:]) != (1, 1, 1):
            raise UntraceableError("it repeats something else than heads")
        return type(self)(self.own, self.tensor, heads=self.heads * counts[1])

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Cached, ...]:
        count, rest = divmod(len(self.heads), chunks)
        if self.flat or self.zeros or dim not in (1, -3) or rest:
            raise UntraceableError("it cuts something else than heads")
        parts = (self.heads[first : first + count] for first in range(0, len(self.heads), count))
        return tuple(type(self)(self.own, self.tensor, heads=part) for part in parts)

    def padded(self, pad: Any, mode: str = "constant", value: Any = None) -> Cached:
        """Return what pad() makes of heads, where it appends zeros to each."""
        if len(pad) != 2 or pad[0] != 0 or mode != "constant" or value or self.flat or self.zeros:
            raise UntraceableError("it pads keys or values with more than zeros at the end of heads")
        return type(self)(self.own, self.tensor, heads=self.heads, zeros=int(pad[1]))

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
        if function is F.pad and args and isinstance(args[0], cls):
            return args[0].padded(*args[1:], **(kwargs or {}))
        if function is torch.cat and len(args) == 1 and all(isinstance(each, cls) for each in args[0]):
            return Joined(args[0], **(kwargs or {}))
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


class Joined:
    """Keys, or values, of two caches end to end, to which code attends at once: to each part, with the weights of all.

    parts: those of each cache.
    """

    def __init__(self, parts: Sequence[Cached], dim: int = 0) -> None:
        if dim not in (2, -2) or len(parts) != 2 or any(each.flat or each.zeros for each in parts):
            raise UntraceableError("it joins something else than the tokens of two caches")
        self.parts = tuple(parts)

    def attended(self, module: nn.Module, query: Tensor, values: Any, mask: Any, **given: Any) -> tuple[Tensor, None]:
        """Attend as CachedKeys do."""
        if not isinstance(values, Joined):
            raise UntraceableError("it attends to joined keys, and not to values that are joined as they are")
        own: Any = [
            keys.own.attend_in_part(query, (keys, held), mask, **given)
            for keys, held in zip(self.parts, values.parts, strict=True)
        ]
        (first, first_lse), (second, second_lse) = own
        return first.lerp(second, torch.sigmoid(second_lse - first_lse)[..., None].to(first.dtype)), None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UntraceableError(f"it calls Tensor.{name}")


class CachedValues(Cached):
    """The values, which code may multiply by weights."""
