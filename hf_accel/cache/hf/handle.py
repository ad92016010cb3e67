"""What stands between a cache's update and the attention function: a note on K that says where the pages are.

RaggedCache is the cache of a ragged pass, that of transformers' own loops is in paged.py.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...errors import NotRaggedError, UnsupportedError
from ...tensors import product_dtype
from ..group import GroupStep, KVStorage, PageGroup, Step

PAGED_HANDLE = "_hf_accel_paged"  # the attribute of a K tensor that carries its PagedKV to the attention function


class CacheOverPages(Cache):
    """unread: the layer whose pages attention has not read yet."""

    unread: LayerOverPages | None = None

    def check_read(self) -> None:
        """Raise UnsupportedError if a layer's attention went past the pages."""
        if self.unread is not None:
            layer, self.unread = self.unread, None
            raise UnsupportedError(bypassed(layer.layer_idx))


class LayerOverPages(CacheLayerMixin):
    """One layer's view of a cache."""

    is_initialized = False

    def __init__(self, cache: CacheOverPages, layer_idx: int, group: PageGroup, group_index: int) -> None:
        # not super().__init__(): it would set `keys` and `values`, which stand in the pages
        self.attach(cache)
        self.layer_idx, self.group, self.group_index = layer_idx, group, group_index

    def attach(self, cache: CacheOverPages) -> None:
        # weak: in a cycle the pages of a finished generate() would stay until the garbage collector runs
        self.cache: Any = weakref.proxy(cache)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def store(self, step: Step, keys: Tensor, values: Tensor) -> PagedKV:
        """Write K, V [B, Hkv, Q, D] of a pass into the pages."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        group_step = step.groups[self.group_index]
        new_keys, new_values = step.tokens(keys), step.tokens(values)
        storage = self.group.storage(self.layer_idx, new_keys, new_values)
        if group_step.written is not None:
            new_keys, new_values = new_keys[group_step.written], new_values[group_step.written]
        storage.write(new_keys, new_values, group_step.slots)
        return PagedKV(self, storage, step, group_step, step.contiguous[self.group_index], values)

    def columns(self) -> tuple[Tensor, Tensor] | None:
        """K and V of all columns, [B, Hkv, T, D]; None if the cache holds none: its tokens are many sequences'."""
        return None

    def get_max_length(self) -> int:
        return -1


@dataclass
class PagedKV:
    """What an attention function needs to read a layer's pages during one forward pass."""

    layer: LayerOverPages
    storage: KVStorage
    step: Step
    group_step: GroupStep
    contiguous: bool
    values: Tensor  # as the cache gave them back

    @property
    def window(self) -> int | None:
        """Tokens that the cache keeps."""
        return self.layer.group.window

    def attach(self, keys: Tensor) -> Tensor:
        """K as a tensor of its own, with this note on it."""
        keys = keys.view_as(keys)
        setattr(keys, PAGED_HANDLE, self)
        self.layer.cache.unread = self.layer
        return keys

    def check_values(self, values: Tensor) -> None:
        """The pages are read from here on. Raises UnsupportedError for a V that did not come from the cache."""
        self.layer.cache.unread = None
        if values is not self.values:
            raise UnsupportedError(bypassed(self.layer.layer_idx, "V"))

    def columns(self, why: str) -> tuple[Tensor, Tensor]:
        """K and V of all columns, [B, Hkv, T, D], zero in the padding.

        Raises NotRaggedError, with the reason given, where the tokens are those of many sequences.
        """
        columns = self.layer.columns()
        if columns is None:
            raise NotRaggedError(
                f"layer {self.layer.layer_idx} cannot attend over several sequences at once: {why}; use "
                "model.generate(), which goes to transformers' own loop for it"
            )
        return columns

    def check_window(self, window: int | None) -> None:
        """Raises UnsupportedError if attention may see tokens that the cache has dropped; window: that of the mask."""
        kept = self.window
        if kept is not None and (window is None or window > kept):
            raise UnsupportedError(
                f"layer {self.layer.layer_idx} attends within {window or 'no'} window, and its cache keeps the last "
                f"{kept} tokens; patch this model with cache=None"
            )


def as_attended(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """K and V as attention will round them: under autocast a rotation leaves K wider than V."""
    dtype = product_dtype(keys)
    return (keys, values) if keys.dtype is dtype is values.dtype else (keys.to(dtype), values.to(dtype))


def bypassed(layer_idx: int, what: str = "K") -> str:
    return (
        f"the attention of layer {layer_idx} did not read the paged cache (the model changes {what} on the "
        "way to its attention function); patch this model with cache=None"
    )


# -- one pass over the tokens of many sequences, end to end in one row ---------------------------------


class RaggedLayer(LayerOverPages):
    """One layer's view. To the model it looks empty, so that it makes no mask: the step says who sees what."""

    is_sliding = False
    is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store K, V [1, Hkv, N, D] of the pass's tokens; K comes back with a PagedKV."""
        self.cache.check_read()
        keys, values = as_attended(key_states, value_states)
        return self.store(self.cache.step, keys, values).attach(keys), values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0


class RaggedCache(CacheOverPages):
    """Given to the model as past_key_values with the `step` that says which slots are written and read."""

    step: Step

    def __init__(self, groups: list[PageGroup], group_of_layer: list[int]) -> None:
        super().__init__(layers=[RaggedLayer(self, i, groups[g], g) for i, g in enumerate(group_of_layer)])
