"""Stand-ins for the scores of attention that a layer's code computes by torch's operators.

They know what code does with scores: it scales them, adds a mask and a bias, takes their softmax, and multiplies
values by it. Who made them says what happens then: a trace records an operation, a pass attends over its pages.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .operation import UntraceableError


class Attending(Protocol):
    """The scores ask these things of the trace that their query comes from.

    mask, bias: the stand-ins for what the code may add to them. mask_hides: whether the mask does nothing but hide
    keys, so that a positive factor does not change it.
    """

    dtype: torch.dtype
    mask: Any
    bias: Any

    @property
    def mask_hides(self) -> bool: ...

    def attend_by(self, scores: Scores, value: Any) -> Any: ...

    def choose(self, condition: Any, scores: Scores, other: Any) -> Scores: ...

    def keep(self, scores: Scores, kept: Tensor, others: Tensor) -> Scores: ...


class TransposedKeys:
    """Keys [B, heads, dim, T], with which queries may be multiplied."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in PRODUCTS and len(args) == 2 and not kwargs and isinstance(args[1], cls):
            return args[1].times(args[0])
        if function is torch.baddbmm and len(args) == 3 and isinstance(args[2], cls) and is_zero(args[0]):
            return scaled_sum(*args[1:], **(kwargs or {}))
        raise UntraceableError(f"it calls {getattr(function, '__name__', function)}")

    def times(self, query: Any) -> Scores:
        """Return the scores of queries [..., T, dim]."""
        scores: Scores = self.keys.scores_of(query)
        return scores

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(f"it calls Tensor.{name}")


PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)


def is_zero(x: Any) -> bool:
    """Return whether x is a tensor of zeros."""
    return isinstance(x, Tensor) and not x.count_nonzero()


def scaled_sum(query: Any, key: Any, *, beta: Any = 1, alpha: Any = 1, bias: Any = None) -> Scores:
    """Return what baddbmm makes of a bias: beta * bias + alpha * query key^T."""
    if not isinstance(key, TransposedKeys) or (bias is not None and beta != 1):
        raise UntraceableError("it multiplies tensors that are not queries and keys")
    scores: Scores = key.times(query) * alpha
    if bias is not None:
        scores += bias
    return scores


class SizeOfBias:
    """A size of a bias of which a trace has no number; code finds that it ends where the keys of a pass do."""

    def __sub__(self, other: Any) -> int:
        return 0


class AddedBias:
    """A bias of positions, which code may add to scores, or cut to the length of the keys before it does so.

    shape: that of the tensor that it stands for, which the code may read.
    """

    def __init__(self, shape: tuple[Any, ...]) -> None:
        self.shape = shape

    def size(self, dim: int) -> Any:
        return self.shape[dim]

    def __getitem__(self, index: Any) -> AddedBias:
        return self

    def baddbmm(self, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Scores:
        return scaled_sum(batch1, batch2, beta=beta, alpha=alpha, bias=self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UntraceableError(f"it calls Tensor.{name} of its bias")


class Scores:
    """The scores [B, heads, T, T] of queries and keys, and the weights that softmax makes of them.

    factor: what the products are multiplied by. is_biased, is_masked: whether the bias and the mask were added.
    is_softmax: whether they are weights now. dtype: of the numbers. mask: the one that the code may add; None for
    that of the trace.
    """

    def __init__(self, trace: Attending, query: Any, key: Any, mask: Any = None) -> None:
        self.mask = trace.mask if mask is None else mask
        self.trace, self.query, self.key, self.dtype = trace, query, key, trace.dtype
        self.factor, self.is_biased, self.is_masked, self.is_softmax = 1.0, False, False, False

    def __mul__(self, number: Any) -> Any:
        if isinstance(number, Tensor) and number.ndim == 4:
            return KeptScores(self, number)
        scaled = copy.copy(self)
        scaled *= number
        return scaled

    def __imul__(self, number: Any) -> Scores:
        is_number = type(number) in (int, float)
        scales_mask = self.is_masked and not (self.trace.mask_hides and is_number and number > 0)
        if not is_number or scales_mask or self.is_biased or self.is_softmax:
            raise UntraceableError("it multiplies scores by more than a number")
        self.factor *= number
        return self

    __rmul__ = __mul__

    def __truediv__(self, number: Any) -> Scores:
        divided = copy.copy(self)
        divided /= number
        return divided

    def __itruediv__(self, number: Any) -> Scores:
        if type(number) not in (int, float) or number == 0:
            raise UntraceableError("it divides scores by more than a number")
        return self.__imul__(1 / float(number))

    def __add__(self, other: Any) -> Scores:
        added = copy.copy(self)
        added += other
        return added

    def __iadd__(self, other: Any) -> Scores:
        if other is self.mask and not (self.is_softmax or (self.is_masked and not self.trace.mask_hides)):
            self.is_masked = True
        elif other is self.trace.bias and not (self.is_biased or self.is_softmax):
            self.is_biased = True
        else:
            raise UntraceableError("it adds something else to scores than a mask and a bias")
        return self

    def masked_fill(self, mask: Any, value: Any) -> Scores:
        lowest = (-math.inf, torch.finfo(self.trace.dtype).min, torch.finfo(torch.float32).min)
        if value not in lowest or not self.trace.mask_hides:
            raise UntraceableError("it fills scores with other numbers than the lowest")
        filled: Scores = self + mask
        return filled

    @property
    def shape(self) -> tuple[Any, ...]:
        return (*self.query.shape[:-1], self.key.shape[-2])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def device(self) -> Any:
        return self.query.device

    def view(self, *sizes: Any) -> Scores:
        return self

    reshape = view

    def float(self) -> Scores:
        return self.to(torch.float32)

    def softmax(self, dim: Any, dtype: Any = None) -> Scores:
        if dim not in (-1, 3) or dtype not in (None, torch.float32, self.dtype) or self.is_softmax:
            raise UntraceableError("its softmax is not that over all keys")
        weights = copy.copy(self)
        weights.is_softmax, weights.dtype = True, dtype or self.dtype
        return weights

    def to(self, dtype: Any) -> Scores:
        # Scores are computed in float32 in any case.
        if dtype is not (self.trace.dtype if self.is_softmax else torch.float32):
            raise UntraceableError("it computes scores in another dtype")
        weights = copy.copy(self)
        weights.dtype = dtype
        return weights

    def __matmul__(self, value: Any) -> Any:
        if not self.is_softmax or self.dtype is not self.trace.dtype:
            raise UntraceableError("it multiplies values by other numbers than weights")
        return self.trace.attend_by(self, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy asks for methods that an object need not have
            raise AttributeError(name)
        raise UntraceableError(f"it calls Tensor.{name}")

    def __bool__(self) -> bool:
        raise UntraceableError("it looks at the numbers of a tensor")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        scores = args[0] if args else given.pop("input", None)
        if isinstance(scores, cls):
            if function in (F.softmax, torch.softmax):
                given.pop("_stacklevel", None)
                return scores.softmax(*args[1:2], **given)
            if function is F.dropout and not drops(*args[1:], **given):
                return scores
            if function in (torch.matmul, torch.bmm) and len(args) == 2 and not given:
                return scores @ args[1]
            # The lowest number of a dtype, which no score is below.
            if function is torch.max and len(args) == 2 and is_lowest(args[1]) and not given:
                return scores
        if function is torch.where and len(args) == 3 and isinstance(args[1], cls) and not given:
            return args[1].trace.choose(*args)
        raise UntraceableError(f"it calls {getattr(function, '__name__', function)}")


class KeptScores:
    """Scores times a tensor [1, 1, T, T] of ones and zeros; code then adds another number in place of each zero."""

    def __init__(self, scores: Scores, kept: Tensor) -> None:
        self.scores, self.kept = scores, kept

    def __add__(self, others: Any) -> Scores:
        if not isinstance(others, Tensor):
            raise UntraceableError("it multiplies scores by more than a number")
        return self.scores.trace.keep(self.scores, self.kept, others)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UntraceableError(f"it calls Tensor.{name} of scores that it has multiplied")


def is_lowest(number: Any) -> bool:
    """Return whether a tensor holds the lowest number of its dtype alone."""
    return isinstance(number, Tensor) and number.ndim == 0 and bool(number == torch.finfo(number.dtype).min)


def drops(p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Return whether dropout with these arguments drops numbers."""
    return training and p > 0


class WideHeads:
    """Queries or keys in float32, [B, heads, T, dim] or [B, T, heads, dim]. The code may round them to the layer's
    dtype, or compute scores of them, for which attention over pages rounds them.

    heads: the same, rounded. transposed: the keys, [B, heads, dim, T]; None where they are not transposed.
    """

    def __init__(self, heads: Any, transposed: TransposedKeys | None = None) -> None:
        self._heads, self._transposed = heads, transposed
        self.shape, self.dtype, self.device = heads.shape, torch.float32, heads.device

    def size(self, index: int | None = None) -> Any:
        return self._heads.size(index)

    def to(self, dtype: Any) -> Any:
        return self if dtype is torch.float32 else self._heads.to(dtype)

    def permute(self, *dims: Any) -> WideHeads:
        return WideHeads(self._heads.permute(*dims))

    def transpose(self, first: int, second: int) -> WideHeads:
        keys = self._heads.transpose(first, second)
        if self._transposed is not None or not isinstance(keys, TransposedKeys):
            raise UntraceableError("it computes in another dtype")
        return WideHeads(self._heads, keys)

    def __matmul__(self, other: Any) -> Scores:
        if not isinstance(other, WideHeads) or other._transposed is None or self._transposed is not None:
            raise UntraceableError("it multiplies tensors that are not queries and keys")
        scores = other._transposed.times(self._heads)
        scores.dtype = torch.float32
        return scores

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in PRODUCTS and len(args) == 2 and not kwargs and isinstance(args[0], cls):
            return args[0] @ args[1]
        if function is torch.cat and isinstance(args[0][0], cls) and not any(isinstance(x, cls) for x in args[0][1:]):
            first, *others = args[0]
            return cls(first._heads.trace.by_function(function, ([first._heads, *others],), kwargs or {}))
        raise UntraceableError(f"it calls {getattr(function, '__name__', function)}")

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(f"it calls Tensor.{name}")
