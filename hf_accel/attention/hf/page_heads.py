"""Heads of keys and values that stand together in a head of the pages, where code attends to them in another order
than that of the cache, or to the keys of one head and the values of another.

Attention over pages reads the keys and the values of one head. Heads that code reads together are stored end to end as
one wider head: a query has zeros where the keys of others stand, and of a result the part of its own values is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...recognition.operation import UntraceableError


class Pairs(NamedTuple):
    """The head of keys and the head of values that each of some heads of queries reads."""

    keys: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class PageHeads:
    """The heads of K and V that each head of the pages holds, all of them as many."""

    sets: tuple[tuple[int, ...], ...]

    @property
    def is_plain(self) -> bool:
        """Return whether the pages hold the heads as the cache has them."""
        return all(own == (place,) for place, own in enumerate(self.sets))

    def stored(self, x: Tensor) -> Tensor:
        """Return K or V [1, H, N, D] as the pages hold it, [1, sets, N, heads of a set * D]."""
        if self.is_plain:
            return x
        return x[:, list(self.sets)].transpose(2, 3).flatten(-2)

    @lru_cache(maxsize=256)  # noqa: B019, each layer of a model asks for the same ones
    def reading(self, pairs: Pairs) -> PageReading:
        """Return how heads of queries read the pages. Raises UntraceableError if one reads two of their heads, or not
        as many read each."""
        place = {head: (number, slot) for number, own in enumerate(self.sets) for slot, head in enumerate(own)}
        if any(place[key][0] != place[value][0] for key, value in zip(*pairs, strict=True)):
            raise UntraceableError("it reads keys and values of heads that are not stored together")
        numbers = [place[key][0] for key in pairs.keys]
        if len({numbers.count(number) for number in range(len(self.sets))}) != 1:
            raise UntraceableError("not as many queries read each head of keys")
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        slots = Pairs(*(tuple(place[head][1] for head in heads) for heads in pairs))
        return PageReading(tuple(order), slots, len(self.sets[0]))


class PageReading(NamedTuple):
    """The way in which heads of queries read pages.

    order: the heads of queries as the heads of pages need them. slots: where in such a head the keys and the values of
    each stand. size: how many heads it holds.
    """

    order: tuple[int, ...]
    slots: Pairs
    size: int

    def queries(self, q: Tensor) -> Tensor:
        """Return queries [1, Hq, N, D] for attention over the pages, [1, Hq, N, size * D]."""
        if self.size > 1:
            wide = q.new_zeros(q.shape[1], self.size, *q.shape[2:])
            wide[range(q.shape[1]), list(self.slots.keys)] = q[0]
            q = wide.transpose(1, 2).flatten(-2)[None]
        return q if self._is_ordered else q[:, list(self.order)]

    def results(self, out: Tensor) -> Tensor:
        """Return what attention over the pages gave, [1, Hq, N, size * Dv], by heads of queries, [1, Hq, N, Dv]."""
        if not self._is_ordered:
            out = out[:, torch.tensor(self.order).argsort()]
        if self.size == 1:
            return out
        parts = out[0].unflatten(-1, (self.size, -1)).transpose(1, 2)
        return parts[range(out.shape[1]), list(self.slots.values)][None]

    @property
    def _is_ordered(self) -> bool:
        return self.order == tuple(range(len(self.order)))


@lru_cache(maxsize=256)
def page_heads(pairs: Pairs, count: int) -> PageHeads:
    """Return the heads of pages for a cache of `count` heads that are read in these pairs.

    Raises UntraceableError if they are not as many in each head.
    """
    sets = [{head} for head in range(count)]
    for both in zip(*pairs, strict=True):
        joined = set().union(*(own for own in sets if own & {*both}))
        sets = [own for own in sets if not own & joined] + [joined]
    found = tuple(sorted(tuple(sorted(own)) for own in sets))
    if len({len(own) for own in found}) != 1:
        raise UntraceableError("it reads some heads of keys with others of values, and not all in the same way")
    return PageHeads(found)


@lru_cache(maxsize=256)
def shared_out(heads: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the head that each of `count` heads of queries reads, as many of them each of `heads`, in order.

    Raises UntraceableError if they cannot be shared out.
    """
    if count % len(heads):
        raise UntraceableError("its heads of queries are no multiple of those of keys")
    group = count // len(heads)
    return tuple(head for head in heads for _ in range(group))
