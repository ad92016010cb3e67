"""Numbers that code computes of the position of each token, and multiplies its queries by: the temperature of Llama 4,
Ministral 3 and Mistral 4 (Nakanishi 2025, "Scalable-Softmax", arXiv 2501.19399).

What the code does with positions is kept as steps, which compute the same of the positions of a pass. Each of them
looks at one number at a time, so that a token's number does not depend on what else is in the pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .operation import UntraceableError
from .symbols import BATCH, TOKENS, TOKENS_BEFORE, Count, Opaque, ZerosOfTokens

STEP_BEFORE: Any = Opaque("the numbers of the step before")
OF_ONE_NUMBER = (torch.floor, torch.ceil, torch.log, torch.log1p, torch.sqrt, torch.exp)
TRIED_POSITIONS = ((0, 1, 7), (40_000, 9_000, 3_000_000))  # positions of two rows


def _by(function: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    def method(self: OfPositions, number: Any) -> Any:
        if type(number) not in (int, float):
            return NotImplemented
        return self.then(function, *((number, STEP_BEFORE) if reflected else (STEP_BEFORE, number)))

    return method


class OfPositions(Opaque):
    """Numbers of the positions of tokens. counted: whether the code counts positions from those of its cache, [T];
    else they are given to it, [B, T]. steps: functions with their arguments, among which STEP_BEFORE stands for what
    the step before has given, and BATCH and TOKENS for sizes. known: what is known of the tensor, see Opaque.
    """

    counted: bool
    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]

    def __init__(self, name: str, *, counted: bool, steps: tuple[Any, ...] = (), **known: Any) -> None:
        super().__init__(name, counted=counted, steps=steps, **known)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfPositions) and (self.name, _key(self.steps)) == (other.name, _key(other.steps))

    __hash__ = None

    def then(self, function: Callable[..., Any], *args: Any) -> OfPositions:
        return OfPositions(self.name, counted=self.counted, steps=(*self.steps, (function, args)))

    __add__, __radd__ = _by(operator.add), _by(operator.add, reflected=True)
    __sub__, __rsub__ = _by(operator.sub), _by(operator.sub, reflected=True)
    __mul__, __rmul__ = _by(operator.mul), _by(operator.mul, reflected=True)
    __truediv__, __rtruediv__ = _by(operator.truediv), _by(operator.truediv, reflected=True)
    __iter__ = None  # transformers' outputs ask whether a value is iterable

    def float(self) -> OfPositions:
        return self.to(torch.float32)

    def to(self, dtype: Any) -> OfPositions:
        if not isinstance(dtype, torch.dtype):
            raise UntraceableError(f"it moves {self.name}")
        return self.then(Tensor.to, STEP_BEFORE, dtype)

    def __getitem__(self, index: Any) -> OfPositions:
        places = index if isinstance(index, tuple) else (index,)
        if not all(each is None or each == slice(None) for each in places):
            raise UntraceableError(f"it takes parts of {self.name}")
        return self.then(operator.getitem, STEP_BEFORE, places)

    @property
    def is_given(self) -> bool:
        """Return whether these are the positions as they are given, [B, T]."""
        return not self.counted and not self.steps

    @property
    def shape(self) -> tuple[Any, ...]:
        if not self.is_given:
            raise UntraceableError(f"it reads the shape of {self.name}")
        return BATCH, TOKENS

    def is_repeated(self, columns: int) -> bool:
        """Return whether each position stands in so many columns, [B, T, columns]."""
        if self.counted:
            return False
        positions = torch.tensor(TRIED_POSITIONS, device="cpu")
        try:
            found = self.of(positions)
        except (RuntimeError, TypeError, IndexError) as error:
            raise UntraceableError(f"it shapes {self.name} in a way of its own") from error
        return torch.equal(found, positions[..., None].expand(-1, -1, columns))

    def repeat(self, *counts: Any) -> OfPositions:
        return self.then(Tensor.repeat, STEP_BEFORE, *counts)

    def unsqueeze(self, dim: Any) -> OfPositions:
        return self.then(Tensor.unsqueeze, STEP_BEFORE, dim)

    def view(self, *sizes: Any) -> OfPositions:
        return self.then(Tensor.reshape, STEP_BEFORE, *_sizes(sizes))

    reshape = view

    def expand(self, *sizes: Any) -> OfPositions:
        return self.then(Tensor.expand, STEP_BEFORE, *_sizes(sizes))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in OF_ONE_NUMBER or len(args) != 1 or kwargs:
            raise UntraceableError(f"it calls {getattr(function, '__name__', function)} of positions")
        return args[0].then(function, STEP_BEFORE)

    def of(self, positions: Tensor) -> Tensor:
        """Return the numbers of positions [B, T], as the code has shaped them."""
        batch, tokens = positions.shape
        value = positions[0] if self.counted else positions
        for function, args in self.steps:
            value = function(*(_actual(each, value, batch, tokens) for each in args))
        return value

    def tried(self, *, heads_first: bool) -> torch.dtype:
        """Return the dtype of the numbers: one for each token of states [B, H, T, D], or [B, T, H, D].

        Raises UntraceableError if the code shapes them for others, or if that of a token depends on other tokens.
        """
        positions = torch.tensor(TRIED_POSITIONS[1:] if self.counted else TRIED_POSITIONS, device="cpu")
        batch, tokens = positions.shape
        try:
            numbers = self.of(positions)
            alone = [self.of(each.view(1, 1)).reshape(()) for each in positions.flatten()]
        except (RuntimeError, TypeError, IndexError) as error:
            raise UntraceableError(f"it shapes {self.name} in a way of its own") from error
        if numbers.shape != ((batch, 1, tokens, 1) if heads_first else (batch, tokens, 1, 1)):
            raise UntraceableError(f"it shapes {self.name} in a way of its own")
        if not numbers.is_floating_point() or not torch.equal(numbers.flatten(), torch.stack(alone)):
            raise UntraceableError(f"what it computes of {self.name} depends on other tokens")
        return numbers.dtype


class CountedTokens(Opaque):
    """The numbers 0, 1, ... of the tokens of a row, to which code adds the number of tokens before."""

    def __init__(self) -> None:
        super().__init__("the numbers of tokens")

    def __add__(self, other: Any) -> Any:
        return OfPositions("positions", counted=True) if other is TOKENS_BEFORE else NotImplemented

    __radd__ = __add__


class MadeOfTokens(ZerosOfTokens):
    """Gives code CountedTokens, too, where it asks torch for the numbers of the tokens of a row."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            function is torch.arange
            and len(args) == 1
            and args[0] is TOKENS
            and not (kwargs or {}).keys() - {"device"}
        ):
            return CountedTokens()
        return super().__torch_function__(function, types, args, kwargs)


class RoundedNext(Opaque):
    """A product in float32, which the code must round to the dtype of the layer next."""

    def __init__(self, product: Any) -> None:
        super().__init__("a product in float32", dtype=torch.float32)
        vars(self)["_product"] = product

    def to(self, dtype: Any) -> Any:
        if dtype is not self._product.dtype:
            raise UntraceableError("it computes in another dtype")
        return self._product


def _key(steps: tuple[Any, ...]) -> list[Any]:
    """Return what is equal for equal steps; counts compare themselves with nothing else."""
    return [
        (function, *(id(each) if isinstance(each, Opaque | Count) else (type(each), each) for each in args))
        for function, args in steps
    ]


def _sizes(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes


def _actual(argument: Any, value: Tensor, batch: int, tokens: int) -> Any:
    """Return what an argument of a step stands for."""
    if argument is STEP_BEFORE:
        return value
    return batch if argument is BATCH else tokens if argument is TOKENS else argument


def behind_tables(tables: tuple[Tensor, Tensor], numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [B or 1, T, D], with one number of each token behind them: the bytes of a float32.

    numbers: [B or 1, T]; both have the larger number of rows.
    """
    rows = max(len(numbers), len(tables[0]))
    behind = numbers.float()[..., None].contiguous().view(tables[0].dtype).expand(rows, -1, -1)
    cos, sin = (torch.cat([each.expand(rows, -1, -1), behind], dim=-1) for each in tables)
    return cos, sin
