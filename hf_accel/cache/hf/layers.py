"""The layers of a paged cache: how a pass stores and reads K and V, and what other layers keep of their tokens.

A cache shows its pages to the attention function as a PagedKV, an attribute on K. RaggedCache, in ragged.py, is the
cache of a ragged pass, and PagedCache, in paged.py, that of transformers' own loops.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...errors import NotRaggedError, UnsupportedError
from ...kernels.layouts import KV
from ...tensors import product_dtype
from ..group import PageGroup
from ..kinds.once import OnceGroup
from ..kinds.state_sizes import StateSizes
from ..kinds.states import StateStep
from ..step import GroupStep, Step
from ..storage import KVStorage
from .kinds import NOT_PAGED

PAGED_HANDLE = "_hf_accel_paged"  # the name of the attribute of K that holds its PagedKV


class CacheOverPages(Cache):
    """A Cache whose layers store K and V in pages.

    unread: the layer that was updated last, until its attention reads the pages; then None.
    given_bias: the bias of positions that the last layer was given, and what it means.
    sequences: the PassSequences of the last pass in which a layer's own code has read each sequence.
    runner: what an earlier call has kept for these pages, until a session takes it.
    """

    unread: LayerOverPages | None = None
    sequences: Any = None
    runner: Any = None
    given_bias: Any = None
    paged_layers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.bias_tables: dict[Any, Any] = {}  # of positions, by the module that has them
        super().__init__(*args, **kwargs)

    def _lay_out(
        self,
        kind: type[LayerOverPages],
        groups: list[PageGroup],
        groups_of_layer: list[tuple[int, ...]],
        of_sources: type[LayerOverPages] | None = None,
    ) -> list[Any]:
        """Make the LayerOverPages of each decoder layer, and return what stands for it in `layers`.

        A layer that keeps keys and values and a state has one for each, see `state_layer`. of_sources: the kind of
        layers that attend to sources; None for a cache that cannot hold their keys.
        """
        once = {g for g, group in enumerate(groups) if isinstance(group, OnceGroup)}
        parts = [
            [each(self, i, groups[g], g) for g in own if (each := of_sources if g in once else kind) is not None]
            for i, own in enumerate(groups_of_layer)
        ]
        self.paged_layers = [part for own in parts for part in own]
        self._state_layers: dict[int, Any] = {i: own[-1] for i, own in enumerate(parts) if own}
        return [own[0] if own else LayerWithoutPages(self.paged_layers[0]) for own in parts]

    def state_layer(self, layer_idx: int) -> Any:
        """Return the LayerOverPages that keeps the state of a recurrent layer, or the keys of an indexer."""
        return self._state_layers[layer_idx]

    def keeps_states(self, layer_idx: int) -> bool:
        """Return whether a layer keeps states."""
        found = self._state_layers.get(layer_idx)
        return found is not None and not found.group.holds_tokens

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Raise UnsupportedError: transformers' convolutions and recurrent layers read no pages."""
        raise UnsupportedError(
            f"layer {layer_idx}, which is no attention, reads no pages; call hf_accel.patch(model) first, which makes "
            f"it read them, or {NOT_PAGED}"
        )

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Store the keys [B, Q, D] of an indexer; return those of all columns, [B, T, D]."""
        layer: LayerOverPages = self.state_layer(layer_idx)
        layer.keep_index_keys(keys)
        halves = layer.columns()
        if halves is None:
            raise NotRaggedError(f"the indexer of layer {layer_idx} reads no pages of several sequences")
        return torch.cat(halves, dim=-1)[:, 0]

    update_conv_state = has_previous_state = get_conv_state  # type: ignore[assignment]
    get_recurrent_state = update_recurrent_state = get_conv_state  # type: ignore[assignment]

    def check_read(self) -> None:
        """Raise UnsupportedError if the attention of the last layer did not read its pages."""
        if self.unread is not None:
            layer, self.unread = self.unread, None
            raise UnsupportedError(bypassed(layer.layer_idx))


class LayerOverPages(CacheLayerMixin):
    """One layer of a CacheOverPages."""

    is_initialized = False
    is_followed = True  # whether it says when a pass has reached it
    attends_to_all = False  # whether each token attends to all keys of its sequence, and not to those before it alone
    says_what_is_seen = False  # whether the Step says what each token attends to, and no mask nor `is_causal` does

    def __init__(self, cache: CacheOverPages, layer_idx: int, group: PageGroup, group_index: int) -> None:
        # super().__init__() is not called: it would set `keys` and `values`, which are in the pages.
        self.attach(cache)
        self.layer_idx, self.group, self.group_index = layer_idx, group, group_index

    def attach(self, cache: CacheOverPages) -> None:
        # The reference is weak to avoid a cycle, which would keep the pages after generate() until the garbage
        # collector runs.
        self.cache: Any = weakref.proxy(cache)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    @property
    def indexer_position_ids(self) -> None:
        """Return None to a decoder that keeps positions for its indexers: code over pages has those of each sequence.

        Raises UnsupportedError where that code does not read pages.
        """
        if self.prepared_step() is None:
            raise UnsupportedError(
                f"the indexer of layer {self.layer_idx} reads no pages; call hf_accel.patch(model) first, which makes "
                f"it read them, or {NOT_PAGED}"
            )

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Any) -> None:
        pass

    def store(self, step: Step, keys: Tensor, values: Tensor) -> PagedKV:
        """Write K and V [B, Hkv, Q, D] of a pass to the pages; returns the handle for the attention function."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        group_step = step.groups[self.group_index]
        new_keys, new_values = self.group.form.joined(step.tokens(keys), step.tokens(values))
        storage = self.group.storage(self.layer_idx, new_keys, new_values)
        if group_step.written is not None:
            new_keys, new_values = new_keys[group_step.written], new_values[group_step.written]
        storage.write(new_keys, new_values, group_step.slots)
        return PagedKV(self, storage, step, group_step, step.contiguous[self.group_index], values)

    def keep_inputs(self, x: Tensor) -> Tensor:
        """Store the inputs [B, Q, C] of a short convolution; return those that each token's result needs.

        Returns [B, Q, C, window]: the last are the token's own, and zeros stand before the first token.
        """
        step: Step = self.cache.step_for(self, x[:, None])
        # One half takes the place of the keys and the other that of the values, so that the kernels write them.
        storage = self.store(step, *x[:, None].chunk(2, dim=-1)).storage
        slots = self.slots_seen(step)
        self.pass_done(step)
        return torch.cat(read_with_zeros(storage, slots), dim=-1).squeeze(-2).transpose(-1, -2)

    def keep_index_keys(self, x: Tensor) -> None:
        """Store the keys [B, Q, D] of an indexer, one half as keys and the other as values."""
        unread, self.cache.unread = self.cache.unread, None  # attention reads its pages after the indexer did
        step: Step = self.cache.step_for(self, x[:, None])
        self.store(step, *x[:, None].chunk(2, dim=-1))
        self.pass_done(step)
        self.cache.unread = unread

    def index_keys(self) -> Tensor:
        """Return the keys [M, D] of an indexer, of all tokens that the sequences of a pass have, end to end."""
        slots = self.cache.step.groups[self.group_index].ragged.slots(self.group.pool.block_size)
        return torch.cat(self.group.storages[self.layer_idx].read(slots), dim=-1).squeeze(1)

    def states(self, x: Tensor, sizes: StateSizes) -> RecurrentPass:
        """Return what a recurrent layer reads and writes in the pass over x [B, Q, C]."""
        step: Step = self.cache.step_for(self, x[:, None])
        return RecurrentPass(step, step.groups[self.group_index], self.state_storage(x, sizes))

    def state_storage(self, x: Tensor, sizes: StateSizes) -> KVStorage:
        """Return the pages of the states of a recurrent layer, and of the inputs that are kept with them.

        x: a tensor on the device of the pages.
        """
        storage = self.group.storages.get(self.layer_idx)
        if storage is None:
            example = x.new_empty(1, 1, max(sizes.state, sizes.inputs), dtype=torch.float32)
            storage = self.group.storage(self.layer_idx, example[..., : sizes.state], example[..., : sizes.inputs])
        return storage

    def slots_seen(self, step: Step) -> Tensor:
        """Return the slots of the tokens in the window of each one, [B, Q, window] int64; -1 where there is none."""
        raise NotImplementedError

    def prepared_step(self) -> Step | None:
        """The Step of the pass that has reached this layer; None if only `update` can make it.

        Raises UnsupportedError if the attention of the last layer did not read its pages.
        """
        self.cache.check_read()
        step: Step | None = self.cache.step
        return step

    def pass_done(self, step: Step) -> None:
        """Note that K and V of a pass were written without `update`."""

    def columns(self) -> tuple[Tensor, Tensor] | None:
        """Return K and V of all columns, [B, Hkv, T, D], or None if the tokens of a pass are of many sequences."""
        return None

    def get_max_length(self) -> int:
        return -1


class LayerWithoutPages(CacheLayerMixin):
    """The place in a cache of a decoder layer that keeps nothing. other: a layer that has pages, as many columns."""

    is_sliding = True  # so that transformers does not ask this layer about the mask of full attention
    is_croppable = True
    is_initialized = True

    def __init__(self, other: LayerOverPages) -> None:
        self.other = other

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise UnsupportedError(f"a layer got keys and values that by the model's config keeps none; {NOT_PAGED}")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.lazy_initialization(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        sizes: tuple[int, int] = self.other.get_mask_sizes(query_length)
        return sizes

    def get_seq_length(self) -> int:
        return self.other.get_seq_length()

    def get_max_length(self) -> int:
        return -1


@dataclass
class RecurrentPass:
    """The states that a recurrent layer reads and writes in a pass over N tokens of B sequences.

    A state is the keys of its slot, and the inputs of the layer's convolution are the values.
    positions: of the tokens, [N] int64, for a layer that reads them.
    """

    step: Step
    group_step: GroupStep
    storage: KVStorage
    positions: Tensor | None = None

    @property
    def states(self) -> StateStep:
        own: StateStep = self.group_step.own
        return own


@dataclass
class PagedKV:
    """A layer's pages as an attention function reads them during one forward pass."""

    layer: LayerOverPages
    storage: KVStorage
    step: Step
    group_step: GroupStep
    contiguous: bool
    values: Tensor  # the values that `update` returned

    @property
    def window(self) -> int | None:
        """The number of last tokens that the cache keeps; None if it keeps all."""
        return self.layer.group.window

    @property
    def chunk(self) -> int | None:
        """The tokens of a chunk, to whose own tokens alone a token attends; None without chunks."""
        return self.layer.group.chunk

    @property
    def rank(self) -> int | None:
        """The numbers of compressed keys; None for keys and values that are not compressed."""
        return self.layer.group.form.rank

    @property
    def pages(self) -> KV:
        return self.layer.group.form.attended(self.storage.pages)

    def held(self) -> tuple[Tensor, Tensor]:
        """Return K and V [1, Hkv, M, D] of all tokens that the sequences of the pass have, end to end."""
        slots = self.group_step.ragged.slots(self.layer.group.pool.block_size)
        keys, values = self.layer.group.form.parted(*self.storage.read(slots))
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def attach(self, keys: Tensor) -> Tensor:
        """Return a view of K that has this handle as an attribute."""
        keys = keys.view_as(keys)
        setattr(keys, PAGED_HANDLE, self)
        self.layer.cache.unread = self.layer
        return keys

    def check_values(self, values: Tensor) -> None:
        """Note that attention reads the pages. Raises UnsupportedError if `values` did not come from the cache."""
        self.layer.cache.unread = None
        if values is not self.values:
            raise UnsupportedError(bypassed(self.layer.layer_idx, "V"))

    def columns(self, why: str) -> tuple[Tensor, Tensor]:
        """Return K and V of all columns, [B, Hkv, T, D], with zeros in the padding.

        Raises NotRaggedError if the tokens are of many sequences. why: the reason, for the message.
        """
        columns = self.layer.columns()
        if columns is None:
            raise NotRaggedError(
                f"layer {self.layer.layer_idx} cannot attend over several sequences at once: {why}; use "
                "model.generate(), which goes to transformers' own loop for it"
            )
        return columns

    def check_window(self, window: int | None) -> None:
        """Raise UnsupportedError if attention may see tokens that the cache dropped. window: the mask's window."""
        kept = self.window
        if kept is not None and (window is None or window > kept):
            raise UnsupportedError(
                f"layer {self.layer.layer_idx} attends within {window or 'no'} window, and its cache keeps the last "
                f"{kept} tokens; patch this model with cache=None"
            )


def read_with_zeros(storage: KVStorage, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return K [..., H, Dk] and V [..., H, Dv] of `slots` [...] int64, with zeros where a slot is negative."""
    hidden = (slots < 0)[..., None, None]
    keys, values = storage.read(slots.clamp(min=0))
    return keys.masked_fill_(hidden, 0), values.masked_fill_(hidden, 0)


def as_attended(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V in the dtype of attention. Under autocast, K has a wider dtype than V after its rotation."""
    dtype = product_dtype(keys)
    return (keys, values) if keys.dtype is dtype is values.dtype else (keys.to(dtype), values.to(dtype))


def bypassed(layer_idx: int, what: str = "K") -> str:
    return (
        f"the attention of layer {layer_idx} did not read the paged cache (the model changes {what} on the "
        "way to its attention function); patch this model with cache=None"
    )


# -- one pass over the tokens of many sequences, end to end in one row ---------------------------------
