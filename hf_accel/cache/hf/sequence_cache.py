"""A cache of single sequences, for layers whose own code computes one sequence, and not tokens of many.

A SequenceCache stands for transformers' cache before such code. It returns the keys, values and states of the tokens
before those of a pass, as transformers' cache does, and writes new ones to the pages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ...errors import NotRaggedError
from .layers import LayerOverPages, as_attended
from .pass_sequences import EqualLengths, PassSequences

MOST_STATES_OF_A_LAYER = 16  # of each of the two sorts that transformers' cache has
SORTS = ("conv_states", "recurrent_states")


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

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
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
