"""What stands between a cache's update and the attention function: a note on K that says where the pages are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ...errors import NotRaggedError, UnsupportedError
from ...tensors import product_dtype
from ..group import PageGroup
from ..step import GroupStep, Step
from ..storage import KVStorage

PAGED_HANDLE = "_hf_accel_paged"  # the attribute of a K tensor that carries its PagedKV to the attention function


class Layer(Protocol):
    """A layer's view of a cache. cache.unread: the layer whose pages attention has not read yet.

    columns: K and V of all columns; None where the cache holds none, since its tokens are those of many sequences.
    """

    cache: Any
    group: PageGroup
    layer_idx: int

    @property
    def columns(self) -> Any: ...


@dataclass
class PagedKV:
    """What an attention function needs to read a layer's pages during one forward pass."""

    layer: Layer
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
        if self.layer.columns is None:
            raise NotRaggedError(
                f"layer {self.layer.layer_idx} cannot attend over several sequences at once: {why}; use "
                "model.generate(), which goes to transformers' own loop for it"
            )
        keys, values = self.layer.columns()
        return keys, values

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
