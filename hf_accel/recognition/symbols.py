"""Values of a layer's code that are no tensors with a row for each token: numbers of tokens, masks and parameters.

The code may pass them on, and do with them what is written here. Whatever else it asks of one raises UntraceableError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .operation import UntraceableError


class Count:
    """The number of rows of a pass, or of tokens of a row, which the code may only pass on."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        raise UntraceableError("it looks at the number of tokens")

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UntraceableError("it does more with the number of tokens than a trace follows")

    def __mul__(self, number: Any) -> Any:
        return Product(self, number) if type(number) is int else NotImplemented

    def __add__(self, other: Any) -> Any:
        return Opaque("the number of keys") if other is TOKENS_BEFORE else NotImplemented

    def __gt__(self, number: Any) -> Any:
        return Opaque("whether there are more tokens than a number")


@dataclass(frozen=True)
class Product:
    """A Count times a number, as the rows of tensors whose rows and heads are one dimension."""

    count: Count
    number: int

    def __floordiv__(self, number: Any) -> Any:
        return self.count if type(number) is int and number == self.number else NotImplemented


def is_shape(sizes: tuple[Any, ...], shape: tuple[Any, ...]) -> bool:
    """Return whether sizes that code asks for are this shape. Numbers must be equal, and Counts the same."""
    known = (int, Product)
    pairs = zip(sizes, shape, strict=False)
    same = all(a is b or (isinstance(a, known) and isinstance(b, known) and a == b) for a, b in pairs)
    return len(sizes) == len(shape) and same


BATCH: Any = Count()
TOKENS: Any = Count()
ALL_TOKENS: Any = Count()  # of all rows of a pass
SOURCE: Any = Count()  # of the output of an encoder
SOURCE_WIDTH: Any = Count()  # of the numbers of each of its rows
ROW_COUNTS = (BATCH, TOKENS, ALL_TOKENS, SOURCE)


class Opaque:
    """A value that a layer may only pass on, such as the mask."""

    def __init__(self, name: str, **known: Any) -> None:
        """known: what the layer may read of it."""
        self.name = name
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(f"it reads {self.name}.{name}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Functions of torch take no argument without this; that of a StandIn is asked first if there is one."""
        raise UntraceableError(f"it calls {getattr(function, '__name__', function)}")

    def __bool__(self) -> bool:
        raise UntraceableError(f"it looks at {self.name}")

    def __eq__(self, other: object) -> bool:  # those of another run of the code are the same
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


WEIGHTS_OF_ATTENTION = Opaque("the weights of its attention")  # of a known module


class MaskStandIn(Opaque):
    """A mask [B, 1, T, keys], of which the code may also read the shape. keys: what stands for the number of keys."""

    def __init__(self, name: str, keys: Count) -> None:
        super().__init__(name)
        self.shape = (BATCH, 1, TOKENS, keys)

    def size(self) -> tuple[Any, ...]:
        return self.shape


TOKENS_BEFORE: Any = Opaque("the number of tokens before")  # those of a pass, which code may only pass on


class Zeros(Opaque):
    """Zeros, of a shape that depends on the number of tokens."""


class ZerosOfTokens(TorchFunctionMode):
    """Gives code Zeros where it asks torch for zeros of a shape that depends on the number of tokens."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = args[0] if function is torch.zeros and args else ()
        if isinstance(sizes, (tuple, list)) and any(each is count for each in sizes for count in ROW_COUNTS):
            return Zeros("zeros")
        return function(*args, **(kwargs or {}))


class Computed(Opaque):
    """A tensor that a method of a module computes of the number of tokens, and of plain values."""

    def __init__(self, module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
        super().__init__(method.__name__)
        vars(self).update(_module=module, _method=method, _args=args, _kwargs=kwargs)

    def is_call_of(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether this is what a module's method of this name makes of these arguments."""
        same = self._module is module and self._method.__name__ == name
        return bool(same and self._args == args and self._kwargs == kwargs)

    def __call__(self, tokens: int) -> Any:
        """Return what the method does with this number of tokens."""
        args = [tokens if each is TOKENS else each for each in self._args]
        kwargs = {name: tokens if each is TOKENS else each for name, each in self._kwargs.items()}
        return self._method(self._module, *args, **kwargs)


class OfSizes(Opaque):
    """A tensor that a module computes of the sizes of a batch and plain values; index: what code takes of it."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], index: Any = ...) -> None:
        super().__init__("what a module computes of the sizes of a batch")
        vars(self).update(_module=module, _args=args, _index=index)

    def __getitem__(self, index: Any) -> OfSizes:
        places = index if isinstance(index, tuple) else (index,)
        if self._index is not ... or not all(each is None or each == slice(None) for each in places):
            raise UntraceableError("it takes parts of what it computes of the sizes of a batch")
        return OfSizes(self._module, self._args, index)

    def __call__(self, shape: tuple[int, int]) -> Any:
        """Return what the module computes for a batch [B, T]."""
        args = (torch.Size(shape) if isinstance(each, tuple) else each for each in self._args)
        return self._module(*args)[self._index]


@dataclass(frozen=True, eq=False)
class Vector:
    """A parameter [width] by which the code may multiply the columns of a tensor. owner, name: where it was read."""

    owner: Mapping[str, Any]
    name: str
    parameter: Tensor

    def __mul__(self, other: Any) -> Any:
        return other * self

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(f"it reads {self.name}.{name}")
