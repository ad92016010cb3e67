"""The sequences of a pass over pages, apart: for layers whose own code computes one sequence, and not tokens of many.

A SequenceCache stands for transformers' cache before such code. It returns the keys, values and states of the tokens
before those of a pass, as transformers' cache does, and writes new ones to the pages.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ...errors import NotRaggedError, UnsupportedError
from ..kinds.states import StateStep
from ..step import Step
from ..storage import KVStorage
from .layers import CacheOverPages, LayerOverPages, as_attended
from .paged import PagedCache

MOST_DRAFTED = 16  # tokens of a sequence that are computed one by one
MOST_STATES_OF_A_LAYER = 16  # of each of the two sorts that transformers' cache has
SORTS = ("conv_states", "recurrent_states")


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


class SequenceCache:
    """The cache of some sequences of a pass, in the calls of one module.

    Each call computes their tokens `first` to `stop` of the pass. touched: the layers whose pages were written.
    """

    def __init__(self, sequences: PassSequences, equal: EqualLengths) -> None:
        self.sequences, self.equal = sequences, equal
        self.first = self.stop = 0
        self._updated: list[Any] = []  # the layers whose keys and values have those of the call
        self.touched: dict[LayerOverPages, None] = {}
        self._tokens: dict[LayerOverPages, tuple[Tensor, Tensor]] = {}  # K and V [G, T, H, D] of all tokens so far
        self._states: dict[int, LinearAttentionLayer] = {}
        self._known: dict[tuple[int, int], None] = {}  # the states that calls have asked for, or changed

    @property
    def layers(self) -> list[LayerOfSequences]:
        return [LayerOfSequences(self, layer) for layer in self.sequences.cache.layers]

    # -- keys and values of tokens -------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any) -> tuple[Tensor, Tensor]:
        """Write K and V [G, Hkv, n, D] of the tokens of the call; return those of all tokens that they can see."""
        both = as_attended(key_states, value_states)
        layer = self.sequences.cache.layers[layer_idx]
        self._updated.append(layer)
        keys, values = self._longer(layer, *(each.transpose(1, 2) for each in both))  # type: ignore[arg-type]
        return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Write the keys [G, n, D] of an indexer; return those of all tokens."""
        layer = self.sequences.cache.state_layer(layer_idx)
        return torch.cat(self._longer(layer, *keys[:, :, None].chunk(2, dim=-1)), dim=-1)[:, :, 0]

    def _longer(self, layer: LayerOverPages, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write K and V [G, n, H, D]; return those of all tokens [G, T, H, D]."""
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        rows = self.equal.rows[:, self.first : self.stop]
        storage = self.sequences.write(layer, (keys, values), rows, key=layer.layer_idx)
        if layer not in self._tokens:
            self._tokens[layer] = self.sequences.read(layer, storage, self.equal)
        both = (torch.cat(each, dim=1) for each in zip(self._tokens[layer], (keys, values), strict=True))
        self._tokens[layer] = next(both), next(both)
        self.touched[layer] = None
        return self._tokens[layer]

    def longer_tables(self, layer_idx: int, name: str, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Write two tables [G, n, D] of a pass next to the keys of an indexer; return those of all tokens.

        Layers that are given the same ones share them. name: of both.
        """
        key, private = (name, self.equal.numbers), self.sequences.private
        if key not in private:
            layer = self.sequences.cache.state_layer(layer_idx)
            pair = tables[0][:, :, None], tables[1][:, :, None]
            storage = self.sequences.write(layer, pair, self.equal.rows, key=name)
            held = self.sequences.read(layer, storage, self.equal)
            private[key] = [torch.cat(each, dim=1)[:, :, 0] for each in zip(held, pair, strict=True)]
        first, second = private[key]
        length = self.equal.start + self.stop
        return first[:, :length], second[:, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before those of the call, and with these if the layer has been updated."""
        done = self.sequences.cache.layers[layer_idx] in self._updated
        return self.equal.start + (self.stop if done else self.first)

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of tokens that those of the call can see, and the number of those before them."""
        window = getattr(getattr(self.sequences.cache.layers[layer_idx], "group", None), "window", None)
        held = self.equal.start if window is None else min(self.equal.start, window - 1)
        return held + self.first + query_length, self.equal.start - held

    # -- states --------------------------------------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        states = self._loaded(layer_idx, state_idx)
        return states.conv_states[state_idx] if states.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        states = self._loaded(layer_idx, state_idx)
        return states.recurrent_states[state_idx] if states.has_previous_state[state_idx] else None

    def update_conv_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **given: Any) -> Tensor:
        return self._loaded(layer_idx, state_idx).update_conv_state(states, state_idx, **given)

    def update_recurrent_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **given: Any) -> Tensor:
        return self._loaded(layer_idx, state_idx).update_recurrent_state(states, state_idx, **given)

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return bool(self._loaded(layer_idx, state_idx).has_previous_state[state_idx])

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def _loaded(self, layer_idx: int, state_idx: int) -> LinearAttentionLayer:
        """Return the states of a layer as transformers' cache has them, of which one is asked for."""
        states = self._states.setdefault(layer_idx, LinearAttentionLayer(MOST_STATES_OF_A_LAYER))
        if (layer_idx, state_idx) in self._known:
            return states
        self._known[layer_idx, state_idx] = None
        pages = self.sequences.cache.state_layer(layer_idx)
        pages.is_followed = False  # it is done with each pass
        for sort in SORTS if self.equal.start else ():
            key = (layer_idx, sort, state_idx)
            if key not in pages.group.shapes:
                continue
            before = self.sequences.states.before[torch.tensor(self.equal.numbers)]
            found, _ = pages.group.storages[key].read(before)
            state = found.view(-1, *pages.group.shapes[key])
            getattr(states, sort)[state_idx] = state
            getattr(states, f"is_{sort}_initialized")[state_idx] = states.has_previous_state[state_idx] = True
            if sort == SORTS[0]:
                states.conv_kernel_size[state_idx], states.dtype, states.device = (
                    state.shape[-1],
                    state.dtype,
                    state.device,
                )
        return states

    def end_call(self) -> None:
        """Write the states after the last token of a call, where the pages have a place for them."""
        self._updated.clear()
        for layer_idx, state_idx in self._known:
            group = self.sequences.cache.state_layer(layer_idx).group
            slots = self.sequences.states.slots[self.equal.rows[:, self.stop - 1]]
            for sort in SORTS if bool((slots >= 0).all()) else ():
                state = getattr(self._states[layer_idx], sort)[state_idx]
                if state is None:
                    continue
                key, numbers = (layer_idx, sort, state_idx), state.reshape(len(state), 1, -1)
                group.shapes[key] = state.shape[1:]
                group.storage(key, numbers, numbers[..., :0]).write(numbers, numbers[..., :0], slots)

    def keys_and_values(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Return K and V [G, Hkv, T, D] that a layer of the pages holds by now."""
        if layer not in self._tokens:
            raise NotRaggedError("the code of a layer reads the keys of its cache before it updates them")
        keys, values = self._tokens[layer]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def __getattr__(self, name: str) -> Any:
        return _unknown(name)


class LayerOfSequences:
    """A layer of a SequenceCache, before code that reads it. layer: that of the pages."""

    def __init__(self, cache: SequenceCache, layer: Any) -> None:
        self._cache, self._layer = cache, layer

    @property
    def keys(self) -> Tensor:
        return self._cache.keys_and_values(self._layer)[0]

    @property
    def values(self) -> Tensor:
        return self._cache.keys_and_values(self._layer)[1]

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length(self._layer.layer_idx)

    def __getattr__(self, name: str) -> Any:
        return _unknown(name)


def _unknown(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotRaggedError(f"the code of a layer reads {name} of its cache, which pages of many sequences do not have")
