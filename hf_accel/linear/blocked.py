"""The weight of a quantized layer in blocks: as it comes from a file, and as it goes into one."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config import Activations, Layout
from .backends.backend import LinearSpec
from .formats import QuantizedWeight
from .formats.blocks import Blocks, tensors_of


class Holder(Protocol):
    """A quantized layer, by what is asked of it here; QuantModule says what each means."""

    in_features: int
    out_features: int
    experts: int
    kind: type[Any]
    dtype: torch.dtype
    activations: Activations
    layout_of_blocks: Layout | None
    _buffers: dict[str, Tensor | None]
    _input_order: Tensor | None

    @property
    def layout(self) -> Layout: ...

    def settle(self) -> None: ...

    def _to_blocks(self) -> Blocks | None: ...


# The blocks that are being written, by the id of their layer.
writing: ContextVar[Mapping[int, Blocks]] = ContextVar("writing", default={})  # noqa: B039  # nobody changes it


def empty_blocks(layer: Holder, *, layout: Layout, device: str = "meta") -> Blocks:
    """Make blocks for the weight of a layer, which nobody has written."""
    shape = (layer.out_features // layer.experts, layer.in_features)
    return Blocks.empty(layout, shape, experts=layer.experts, dtype=layer.dtype, device=device)


def loaded_blocks(layer: Holder) -> Blocks | None:
    """Return the blocks that were loaded and are not packed yet; None for the stored form, and for a packed weight."""
    return None if layer.layout_of_blocks is None else Blocks.of_state(layer._buffers)


def weight_names(layer: Holder) -> list[str]:
    """Return the names of the buffers of a layer that stand for its weight."""
    blocks = loaded_blocks(layer)
    names = tensors_of(blocks) if blocks is not None else [field.name for field in fields(layer.kind)]
    return [name for name in names if name in layer._buffers]


def from_blocks(layer: Holder, blocks: Blocks) -> QuantizedWeight:
    """Return the stored form of the blocks that were loaded into a layer."""
    assert layer.layout_of_blocks is not None
    shape = (layer.out_features // layer.experts, layer.in_features)
    return blocks.stored(layer.layout_of_blocks, shape, experts=layer.experts)


def spec_of_blocks(layer: Holder) -> LinearSpec | None:
    """Return the spec of the blocks that were loaded into a layer; None if there are none."""
    blocks = loaded_blocks(layer)
    if layer.layout_of_blocks is None or blocks is None:
        return None
    scale = blocks.weight_scale
    return LinearSpec(
        in_features=layer.in_features, out_features=layer.out_features, dtype=layer.dtype,
        layout=replace(layer.layout_of_blocks, scale_dtype=scale.dtype), device_type=scale.device.type,
        activations=layer.activations,
    )  # fmt: skip


def in_blocks(layer: Holder) -> Blocks | None:
    """Return the packed weight as a file holds it, over the same memory except for experts; None: no such form.

    A weight whose blocks would not be those that config.json's settings describe stays in the stored form.
    """
    layer.settle()
    found = layer._to_blocks()
    if found is None:
        return None
    found = replace(found, input_order=layer._input_order)
    expected = empty_blocks(layer, layout=layer.layout)
    return found if _described(tensors_of(found)) == _described(tensors_of(expected)) else None


def _described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
