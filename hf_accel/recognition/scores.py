"""Stand-ins for the scores of attention that a layer's code computes by torch's operators."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from .operation import UntraceableError


class Attending(Protocol):
    """The scores ask these things of the trace that their query comes from.

    mask, bias: the stand-ins for what the code may add to them.
    """

    dtype: torch.dtype
    mask: Any
    bias: Any

    def attend_by(self, scores: Scores, value: Any) -> Any: ...


class TransposedKeys:
    """Keys [B, heads, dim, T], with which queries may be multiplied."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.matmul and len(args) == 2 and not kwargs:
            return args[0] @ args[1]
        raise UntraceableError(f"it calls {getattr(function, '__name__', function)}")

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(f"it calls Tensor.{name}")


class Scores:
    """The scores [B, heads, T, T] of queries and keys, and the weights that softmax makes of them.

    factor: what the products are multiplied by. is_biased, is_masked: whether the bias and the mask were added.
    is_softmax: whether they are weights now. dtype: of the numbers.
    """

    def __init__(self, trace: Attending, query: Any, key: Any) -> None:
        self.trace, self.query, self.key, self.dtype = trace, query, key, trace.dtype
        self.factor, self.is_biased, self.is_masked, self.is_softmax = 1.0, False, False, False

    def __mul__(self, number: Any) -> Scores:
        if type(number) not in (int, float) or self.is_biased or self.is_masked or self.is_softmax:
            raise UntraceableError("it multiplies scores by more than a number")
        scaled = copy.copy(self)
        scaled.factor = self.factor * number
        return scaled

    __rmul__ = __mul__

    def __truediv__(self, number: Any) -> Scores:
        if type(number) not in (int, float) or number == 0:
            raise UntraceableError("it divides scores by more than a number")
        return self.__mul__(1 / float(number))

    def __add__(self, other: Any) -> Scores:
        added = copy.copy(self)
        added += other
        return added

    def __iadd__(self, other: Any) -> Scores:
        if other is self.trace.mask and not (self.is_masked or self.is_softmax):
            self.is_masked = True
        elif other is self.trace.bias and not (self.is_biased or self.is_softmax):
            self.is_biased = True
        else:
            raise UntraceableError("it adds something else to scores than a mask and a bias")
        return self

    def _in_place(self, other: Any) -> Any:
        raise UntraceableError("it writes to scores in place")

    __imul__ = __itruediv__ = _in_place

    def softmax(self, dim: Any, dtype: Any = None) -> Scores:
        if dim not in (-1, 3) or dtype not in (None, torch.float32, self.dtype) or self.is_softmax:
            raise UntraceableError("its softmax is not that over all keys")
        weights = copy.copy(self)
        weights.is_softmax, weights.dtype = True, dtype or self.dtype
        return weights

    def to(self, dtype: Any) -> Scores:
        if dtype is not self.trace.dtype or not self.is_softmax:
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
            if function is torch.matmul and len(args) == 2 and not given:
                return scores @ args[1]
        raise UntraceableError(f"it calls {getattr(function, '__name__', function)}")


def drops(p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Return whether dropout with these arguments drops numbers."""
    return training and p > 0
