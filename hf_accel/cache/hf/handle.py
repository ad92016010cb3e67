"""What stands between a cache's update and the attention function: a note on K that says where the pages are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ...kernels.cpu.tensors import product_dtype
from ..group import PageGroup
from ..step import GroupStep, Step
from ..storage import KVStorage

PAGED_HANDLE = "_hf_accel_paged"  # the attribute of a K tensor that carries its PagedKV to the attention function


class Layer(Protocol):
    """A layer's view of a cache. cache.unread: the layer whose pages attention has not read yet."""

    cache: Any
    group: PageGroup

    def columns(self) -> tuple[Tensor, Tensor]: ...


@dataclass
class PagedKV:
    """What an attention function needs to read a layer's pages during one forward pass."""

    layer: Layer
    storage: KVStorage
    step: Step
    group_step: GroupStep
    contiguous: bool

    def columns(self) -> tuple[Tensor, Tensor]:
        """K and V of all columns, [B, Hkv, T, D], zero in the padding."""
        return self.layer.columns()

    def attach(self, keys: Tensor) -> Tensor:
        """K as a tensor of its own, with this note on it."""
        keys = keys.view_as(keys)
        setattr(keys, PAGED_HANDLE, self)
        self.layer.cache.unread = self.layer
        return keys


def as_attended(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """K and V as attention will round them: under autocast a rotation leaves K wider than V."""
    dtype = product_dtype(keys)
    return (keys, values) if keys.dtype is dtype is values.dtype else (keys.to(dtype), values.to(dtype))


def bypassed(layer_idx: int) -> str:
    return (
        f"the attention of layer {layer_idx} did not read the paged cache (the model changes K on the "
        "way to its attention function); patch this model with cache=None"
    )
