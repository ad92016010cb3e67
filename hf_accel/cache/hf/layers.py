"""The layers of a paged cache: their sliding windows, from a model's config, and how a pass stores and reads K and V.

A cache shows its pages to the attention function as a PagedKV, an attribute on K. RaggedCache is the cache of a ragged
pass. PagedCache, in paged.py, is the cache of transformers' own loops.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from ...config import CacheConfig
from ...errors import NotRaggedError, UnsupportedError
from ...tensors import product_dtype
from ..group import GroupStep, KVStorage, PageGroup, SharedContext, Step
from ..quantized import QUANTIZED

NOT_PAGED = "use transformers' own cache"
REMADE = "make it with hf_accel.PagedCache(model.config)"
CONVOLVED_TOKENS = "conv_L_cache"  # the setting of LFM2 that says how many tokens its convolutions see
FIRST_TOKENS = 1024  # the initial capacity, in tokens over all sequences, of a cache that grows


class LayerKind(NamedTuple):
    """The state that a decoder layer keeps of its tokens: keys and values, or the inputs of a short convolution.

    window: the number of last tokens that it keeps; None for all.
    """

    window: int | None
    convolves: bool = False


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Return the window of each decoder layer, None for full attention. Raises what `layer_kinds` raises."""
    return [kind.window for kind in layer_kinds(config)]


def layer_kinds(config: PreTrainedConfig) -> list[LayerKind]:
    """Return what each decoder layer keeps, as in transformers' DynamicCache.

    Raises UnsupportedError for a layer that caches anything but the keys and values, or the inputs of a convolution,
    of all tokens or of the last ones.
    """
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedError(f"config is a {type(config).__name__}; a PagedCache is made from model.config")
    decoder = config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(decoder, "layer_types", None) or ()):
        raise UnsupportedError(f"a paged cache cannot hold chunked attention layers; {NOT_PAGED}")
    kinds: list[LayerKind] = []
    try:
        layers = DynamicCache(config=decoder).layers
    except (AttributeError, RuntimeError) as error:
        raise UnsupportedError(f"transformers makes no cache from a {type(decoder).__name__}; {NOT_PAGED}") from error
    for layer, name in zip(layers, layer_names(decoder, len(layers)), strict=False):
        kind = layer_kind(layer, name, decoder)
        if kind is None:
            raise UnsupportedError(f"a paged cache cannot hold a {type(layer).__name__}; {NOT_PAGED}")
        kinds.append(kind)
    if not kinds:
        raise UnsupportedError(
            f"{type(config).__name__} describes no decoder layers, and a paged cache needs some; {NOT_PAGED}"
        )
    return kinds


def layer_names(decoder: Any, count: int) -> list[str | None]:
    """Return what a decoder's config calls each of `count` layers; None where it has one kind alone."""
    return list(getattr(decoder, "layer_types", None) or [None] * count)


def layer_kind(layer: Any, name: str | None, decoder: Any) -> LayerKind | None:
    """Return what a layer of transformers' DynamicCache keeps; None if pages cannot hold it.

    name: what the decoder's config calls the layer.
    """
    if type(layer) is DynamicLayer:
        return LayerKind(None)
    if type(layer) is DynamicSlidingWindowLayer:
        return LayerKind(layer.sliding_window)
    window = getattr(decoder, CONVOLVED_TOKENS, None)
    if name == "conv" and type(layer) is LinearAttentionLayer and isinstance(window, int):
        return LayerKind(window, convolves=True)
    return None


def page_groups(
    config: PreTrainedConfig,
    settings: CacheConfig,
    *,
    capacity: int = FIRST_TOKENS,
    context: SharedContext | None = None,
) -> tuple[list[PageGroup], list[int]]:
    """Make a PageGroup for each kind of layer, and return them with the index of each layer's group.

    capacity: the tokens that a growing cache has room for at first. context: the ranks that share out the blocks.
    """
    kinds = layer_kinds(config)
    tokens = capacity if settings.max_tokens is None else settings.max_tokens
    distinct_kinds = list(dict.fromkeys(kinds))
    groups = [
        PageGroup(
            window=kind.window,
            num_blocks=max(1, -(-tokens // settings.block_size)),
            block_size=settings.block_size,
            growable=settings.max_tokens is None,
            prefix_sharing=settings.prefix_sharing,
            quantized=None if kind.convolves else QUANTIZED.get(settings.dtype),
        )
        for kind in distinct_kinds
    ]
    for group in groups:
        group.context = context
    return groups, [distinct_kinds.index(kind) for kind in kinds]


def check_windows(own: list[int | None], config: PreTrainedConfig) -> None:
    """Raise UnsupportedError unless `own`, the windows of a cache's layers, are those of this config."""
    wanted = layer_windows(config)
    if own != wanted:
        raise UnsupportedError(
            f"the PagedCache is for {_described(own)}, and the model has {_described(wanted)}; {REMADE}"
        )


def _described(windows: list[int | None]) -> str:
    phrases = dict.fromkeys("without a window" if w is None else f"with a window of {w}" for w in windows)
    return f"{len(windows)} layers {' and '.join(phrases)}"


PAGED_HANDLE = "_hf_accel_paged"  # the name of the attribute of K that holds its PagedKV


class CacheOverPages(Cache):
    """A Cache whose layers store K and V in pages.

    unread: the layer that was updated last, until its attention reads the pages; then None.
    known_pass: what is known of the pass that is under way (fused.hf.layer_calls.KnownPass); None if nothing is.
    """

    unread: LayerOverPages | None = None
    known_pass: Any = None

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Raise UnsupportedError: transformers' convolutions read no pages."""
        raise UnsupportedError(
            f"the convolution of layer {layer_idx} reads no pages; call hf_accel.patch(model) first, which makes it "
            f"read them, or {NOT_PAGED}"
        )

    update_conv_state = has_previous_state = get_conv_state  # type: ignore[assignment]

    def check_read(self) -> None:
        """Raise UnsupportedError if the attention of the last layer did not read its pages."""
        if self.unread is not None:
            layer, self.unread = self.unread, None
            raise UnsupportedError(bypassed(layer.layer_idx))


class LayerOverPages(CacheLayerMixin):
    """One layer of a CacheOverPages."""

    is_initialized = False

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

    def store(self, step: Step, keys: Tensor, values: Tensor) -> PagedKV:
        """Write K and V [B, Hkv, Q, D] of a pass to the pages; returns the handle for the attention function."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        group_step = step.groups[self.group_index]
        new_keys, new_values = step.tokens(keys), step.tokens(values)
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


class RaggedLayer(LayerOverPages):
    """One layer of a RaggedCache.

    It tells the model that it is empty, so that the model makes no mask. The Step says what each token attends to.
    """

    is_sliding = False
    is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store K and V [1, Hkv, N, D] of the pass's tokens, and return them; K carries a PagedKV."""
        self.cache.check_read()
        keys, values = as_attended(key_states, value_states)
        return self.store(self.cache.step, keys, values).attach(keys), values

    def slots_seen(self, step: Step) -> Tensor:
        slots: Tensor = self.cache.slots_before(self.group_index)
        return slots[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0


class RaggedCache(CacheOverPages):
    """The past_key_values of a ragged pass. step: says which slots the pass writes and reads."""

    step: Step

    def __init__(self, groups: list[PageGroup], group_of_layer: list[int]) -> None:
        self._groups = groups
        self._slots_before: tuple[Step | None, dict[int, Tensor]] = (None, {})
        super().__init__(layers=[RaggedLayer(self, i, groups[g], g) for i, g in enumerate(group_of_layer)])

    def step_for(self, layer: RaggedLayer, keys: Tensor) -> Step:
        return self.step

    def slots_before(self, group_index: int) -> Tensor:
        """Return the slots in the window of each token, [N, window], which the layers of a group share."""
        if self._slots_before[0] is not self.step:
            self._slots_before = (self.step, {})
        known, group = self._slots_before[1], self._groups[group_index]
        if group_index not in known:
            ragged = self.step.groups[group_index].ragged
            known[group_index] = ragged.slots_before(group.window or 1, group.pool.block_size)
        return known[group_index]
