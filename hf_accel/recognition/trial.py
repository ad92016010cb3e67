"""Trials: does a module, or a function, give the same as ours on random input?"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .unchanged import HOOKS


class Tolerance(NamedTuple):
    """The allowed distance of a number from the expected one; its parts are added up.

    roundings: a share of that number, in roundings of its dtype. relative: a share of it. absolute: a constant.
    of_largest: a share of the largest number.
    """

    roundings: int = 0
    relative: float = 0.0
    absolute: float = 0.0
    of_largest: float = 0.0


EXACT = Tolerance()


class RandomNumbers:
    """Normal numbers that are the same in each trial, made on the CPU; the user's random numbers stay."""

    def __init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Tensor:
        """Draw a tensor of this shape."""
        return torch.randn(*shape, generator=self._generator, dtype=torch.float32, device="cpu").to(device, dtype)


def unwatched_twin(module: nn.Module, **parts: dict[str, Any]) -> Any:
    """Copy a module for a trial: without its hooks, and with dictionaries of its own, of which `parts` are changed.

    parts: entries of `_modules` or `_parameters`, by that name; the others are shared with the module. A module's own
    weights may be many, or not loaded yet, and its layers would call hooks that a user has registered on them.
    """
    twin = copy.copy(module)
    vars(twin).update({name: OrderedDict() for name in HOOKS})
    vars(twin).update({name: {**vars(twin)[name], **entries} for name, entries in parts.items()})
    return twin


@torch.no_grad()
def difference(theirs: Callable[[], Any], ours: Callable[[], Any], tolerance: Tolerance = EXACT) -> float:
    """Return the share of numbers in which ours differ from theirs, summed over the tensors that each returns.

    theirs, ours: return a tensor, or a tuple of tensors, when they are called. Infinite where a number differs by more
    than the tolerance, a dtype or a shape by anything, or one of both fails: what cannot be tried is not known. The
    user's random numbers stay as they are.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # the tried code may have dropout
            pairs = list(zip(_tensors(theirs()), _tensors(ours()), strict=True))
            return sum(_apart(expected, got, tolerance) for expected, got in pairs)
    except Exception:
        return math.inf


def agree(theirs: Callable[[], Any], ours: Callable[[], Any], tolerance: Tolerance = EXACT) -> bool:
    """Return whether the `difference` is finite."""
    return difference(theirs, ours, tolerance) < math.inf


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _apart(expected: Tensor, got: Tensor, tolerance: Tolerance) -> float:
    if expected.dtype is not got.dtype or expected.shape != got.shape:
        return math.inf
    first, second = got.double(), expected.double()
    relative = tolerance.relative + tolerance.roundings * torch.finfo(got.dtype).eps
    absolute = tolerance.absolute + (tolerance.of_largest and tolerance.of_largest * float(second.abs().max()))
    if not torch.allclose(first, second, rtol=relative, atol=absolute):
        return math.inf
    return float((first != second).float().mean())
