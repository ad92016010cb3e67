"""The base of what is known of modules by trials of their code: what a trace records in place of running it, and what
an operation of theirs reads of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..tensors import PLAIN
from .unchanged import PLAIN_TYPES

Answer = TypeVar("Answer")
Said = Callable[[str], Any]  # gives an argument of a call by its name, None if the call has none
_answers: dict[Hashable, Any] = {}


class TokenPlaces(NamedTuple):
    """Says how a module reads its mask.

    of: gives the places of a batch [B, T] that a mask says hold tokens, bool [B, T], or None for a mask of another
    form. hides: whether queries at padding see no key, so that nothing else may be computed there.
    """

    of: Callable[[Any, int, int], Tensor | None]
    hides: bool = False


class PositionRows(NamedTuple):
    """Keys and queries of positions, [R, width], and the row of each distance of two tokens, int32 [2 M - 1].

    queries: None where keys alone have positions.
    """

    keys: Tensor
    queries: Tensor | None
    rows: Tensor


class KnownModule(NamedTuple):
    """One kind of modules that a trial of their code knows.

    parts: returns what is known of a module, None (or False) if it is of no such kind. recorded: records what a module
    does with stand-ins, and returns what its code would; it is given the trace, the module with its parts, and
    the arguments of the call. inputs: the names of what a layer is given for such modules alone. attends: whether they
    attend by themselves. products: the names of their convolutions that are linear layers. others: which calls of a
    layer with such a module are stock's, as the end of a list.

    An operation that reads more of a call than rows has a function `read` among its values: operation, RowLayout,
    Said, CallTensors -> these with what it reads, or None for a call of another form.
    """

    parts: Callable[[nn.Module], Any]
    recorded: Callable[..., Any]
    inputs: tuple[str, ...] = ()
    attends: bool = False
    products: tuple[str, ...] = ()
    others: str = ""


def tried(key: Hashable, trial: Callable[[], Answer]) -> Answer:
    """Return what a trial of code gives, which is made once. key: all that the answer depends on."""
    if key not in _answers:
        _answers[key] = trial()
    answer: Answer = _answers[key]
    return answer


def note_parts(record: Any, module: nn.Module) -> None:
    """Note that a module is not called, and that its settings and its parts must not change."""
    own = vars(module)
    record.visit(module)
    for name, value in own.items():
        if isinstance(value, PLAIN_TYPES):
            record.note(own, name, value)
    for held in (own["_modules"], own["_parameters"]):
        for name, part in held.items():
            record.note(held, name, part)


def _of_ones(mask: Any, batch: int, tokens: int) -> Tensor | None:
    """Return the places where a mask [B, T] is 1, bool [B, T]; None for another form."""
    return mask == 1 if type(mask) in PLAIN and mask.is_cpu and mask.shape == (batch, tokens) else None


def _of_pairs(mask: Any, batch: int, tokens: int) -> Tensor | None:
    """Return the places of which a mask [B, 1, T, T] is not 0 for each pair, the first of each row among them."""
    if type(mask) not in PLAIN or not mask.is_cpu or mask.shape != (batch, 1, tokens, tokens):
        return None
    seen = mask[:, 0].bool()
    real = seen.diagonal(dim1=1, dim2=2)
    return real if bool(real[:, 0].all()) and torch.equal(seen, real[:, :, None] & real[:, None]) else None


ONES, PAIRS = TokenPlaces(_of_ones), TokenPlaces(_of_pairs, hides=True)
