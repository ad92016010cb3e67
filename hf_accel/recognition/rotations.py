"""The forms in which code calls a rotation: of queries and keys together or of one tensor, and with tables of all
numbers of a head or of half of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .trial import RandomNumbers, Tolerance, agree

Rotation = Callable[..., tuple[Tensor, Tensor]]
OF_ONE = ("x", "cos", "sin")  # the first parameters of code that rotates one tensor


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
