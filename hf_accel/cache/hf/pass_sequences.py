"""The sequences of a pass over pages, apart: which tokens of a pass, and which slots, are theirs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...errors import NotRaggedError, UnsupportedError
from ..kinds.states import StateStep
from ..step import Step
from ..storage import KVStorage
from .layers import CacheOverPages, LayerOverPages
from .paged import PagedCache

MOST_DRAFTED = 16  # tokens of a sequence that are computed one by one


def step_under_way(cache: Any) -> Step | None:
    """Return the Step of a pass that has not reached all layers; None if none was prepared."""
    if isinstance(cache, PagedCache) and (cache.step is None or cache.step.gathers or not cache._is_unfinished):
        return None
    step: Step = cache.step
    return step


def tokens_before(cache: Any, firsts: list[int]) -> list[int]:
    """Return the number of tokens before those of each sequence of a pass. firsts: where each of them begins in it."""
    if not isinstance(cache, PagedCache):
        found: list[int] = cache.positions[firsts[:-1]].tolist()
        return found
    counts = (stop - first for first, stop in pairwise(firsts))
    return [each.num_tokens - count for each, count in zip(cache.padded.sequences, counts, strict=True)]


def columns_of_tokens(cache: Any, num_new: int) -> list[tuple[Tensor, Tensor]] | None:
    """Return which of the last `num_new` columns hold tokens, and which of all columns do, of each sequence.

    None for a ragged pass, whose tokens have no columns.
    """
    if not isinstance(cache, PagedCache):
        return None
    mask, total = cache.padded.token_mask, cache.padded.num_columns
    rows = torch.ones(len(cache.padded.sequences), total, dtype=torch.bool) if mask is None else mask.cpu().bool()
    return [(row[total - num_new :].nonzero().squeeze(1), row.nonzero().squeeze(1)) for row in rows]


@dataclass(frozen=True)
class EqualLengths:
    """Sequences of a pass that are computed in one call: G of them, which have as many tokens in it.

    numbers: which of the pass's sequences they are. rows: [G, n], which of its N tokens are theirs. start: the tokens
    before them; where a call does not depend on their number, that of one of them. ends: after which tokens a call
    ends, so that the state after each of them can be kept; the last is n.
    """

    numbers: tuple[int, ...]
    rows: Tensor
    start: int
    ends: tuple[int, ...]


class PassSequences:
    """The sequences of one pass, whose Step the cache has.

    served: the modules that have read them. private: what layers hand on to each other of each sequence, by what the
    model hands on for all of them.
    """

    def __init__(self, cache: CacheOverPages, step: Step) -> None:
        if step.looks_ahead:
            raise NotRaggedError("tokens see later ones, and a layer's own code computes each sequence causally")
        self.cache, self.step = cache, step
        self.served: set[int] = set()
        self.private: dict[Hashable, Any] = {}
        self.firsts: list[int] = next(g.ragged.cu_q for g in step.groups if g.own is None).tolist()
        self.counts = [stop - first for first, stop in pairwise(self.firsts)]
        self.starts = tokens_before(cache, self.firsts)
        self._equal: dict[tuple[bool, ...], list[EqualLengths]] = {}
        self._slots: dict[int, Tensor] = {}
        self._held: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    @staticmethod
    def of(cache: CacheOverPages, module: Any) -> PassSequences:
        """Return those of the pass that is under way over a cache, which a module reads once.

        Raises UnsupportedError for a PagedCache whose pass was not prepared, as that of a model without a patch.
        """
        found: PassSequences | None = cache.sequences
        own: Any = cache
        step = own.step if found is not None and found.step is own.step else step_under_way(cache)
        if found is None or found.step is not step:
            found = cache.sequences = None if step is None else PassSequences(cache, step)
        if found is None or id(module) in found.served:
            raise UnsupportedError(
                f"layer {module.layer_idx} reads no pages in a pass that was not prepared; call hf_accel.patch(model) "
                "first, give the model an attention_mask of two dimensions or none, or use transformers' own cache"
            )
        found.served.add(id(module))
        return found

    @cached_property
    def states(self) -> StateStep:
        """Return where the states of the pass are, of a cache that has some."""
        return next(group.own for group in self.step.groups if isinstance(group.own, StateStep))

    @cached_property
    def _kept(self) -> list[bool]:
        """Return of each token of the pass whether the state after it is kept."""
        return (self.states.slots >= 0).tolist()

    def equal(self, *, attends: bool, has_states: bool, selects: bool) -> list[EqualLengths]:
        """Return the sequences by the calls that compute them.

        attends: whether a call depends on the number of tokens before. has_states: whether the layer keeps states.
        selects: whether a call chooses some of the tokens before. Which of two equal ones it takes may depend on what
        else is computed: so tokens that are generated, or drafted, are computed one by one.
        """
        key = attends, has_states, selects
        if key not in self._equal:
            sets: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
            for number, count in enumerate(self.counts):
                start = self.starts[number] if attends else min(1, self.starts[number])
                ends = self._ends(number) if has_states else (count,)
                if selects and start and count <= MOST_DRAFTED:
                    ends = tuple(range(1, count + 1))
                sets.setdefault((count, start, ends), []).append(number)
            device = self.step.groups[0].slots.device
            self._equal[key] = [
                EqualLengths(
                    tuple(numbers),
                    torch.tensor([self.firsts[each] for each in numbers], device=device)[:, None]
                    + torch.arange(count, device=device),
                    self.starts[numbers[0]],
                    ends,
                )
                for (count, _, ends), numbers in sets.items()
                if count
            ]
        return self._equal[key]

    def _ends(self, number: int) -> tuple[int, ...]:
        first, count = self.firsts[number], self.counts[number]
        kept = self._kept[first : first + count]
        return tuple(dict.fromkeys([*(place + 1 for place, keeps in enumerate(kept) if keeps), count]))

    def slots(self, group_index: int) -> Tensor:
        """Return the slots [N] that the tokens of the pass are written to in a group, -1 where they are not."""
        if group_index not in self._slots:
            group = self.step.groups[group_index]
            slots = group.slots
            if group.written is not None:
                slots = torch.full((self.firsts[-1],), -1, dtype=torch.int64, device=slots.device)
                slots[group.written] = group.slots
            self._slots[group_index] = slots
        return self._slots[group_index]

    def held(self, layer: LayerOverPages, equal: EqualLengths) -> Tensor:
        """Return the slots [G, P] of the tokens before those of the pass that they can attend to."""
        key = layer.group_index, equal.numbers
        if key not in self._held:
            window, ragged = layer.group.window, self.step.groups[layer.group_index].ragged
            count = equal.start if window is None else min(equal.start, window - 1)
            size, table, device = layer.group.pool.block_size, ragged.block_table, ragged.kv_len.device
            assert table is not None
            numbers = torch.tensor(equal.numbers, device=device)
            ends = ragged.kv_len[numbers].long() - equal.rows.shape[1]
            places = ends[:, None] + torch.arange(-count, 0, device=device)
            self._held[key] = table.long()[numbers[:, None], places // size] * size + places % size
        return self._held[key]

    def write(self, layer: LayerOverPages, pair: tuple[Tensor, Tensor], rows: Tensor, *, key: Any) -> KVStorage:
        """Write K and V [G, n, H, D] of the tokens `rows` [G, n] of the pass; returns where. key: of the storage."""
        new_keys, new_values = layer.group.form.joined(*(each.flatten(0, 1) for each in pair))
        storage = layer.group.storage(key, new_keys, new_values)
        slots = self.slots(layer.group_index)[rows].flatten()
        if bool((written := slots >= 0).all()):
            storage.write(new_keys, new_values, slots)
        else:
            storage.write(new_keys[written], new_values[written], slots[written])
        return storage

    def read(self, layer: LayerOverPages, storage: KVStorage, equal: EqualLengths) -> tuple[Tensor, Tensor]:
        """Return K and V [G, P, H, D] of the tokens before those of the pass that they can attend to."""
        return layer.group.form.parted(*storage.read(self.held(layer, equal)))

    def placed(self, parts: Sequence[tuple[EqualLengths, Tensor]]) -> Tensor:
        """Return the results [G, n, ...] of calls as the tokens of the pass, [N, ...]."""
        equal, first = parts[0]
        if len(parts) == 1 and len(equal.numbers) == 1:
            return first[0]
        out = first.new_empty(self.firsts[-1], *first.shape[2:])
        for each, part in parts:
            out[each.rows] = part
        return out
