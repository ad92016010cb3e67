"""The storage of quantized weights, a file for each kind; no other code knows their bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor

from ...config import Format, Layout
from .byte_weight import FLOAT8, ByteWeight, Float8Weight, Int8Weight
from .float4_weight import MXFP4, Float4Weight, Mxfp4Weight
from .low_bit_weight import Int2Weight, Int3Weight, Int4Weight, LowBitWeight
from .nvfp4_weight import NVFP4, Nvfp4Weight
from .quantized_weight import QuantizedWeight, check_group_size, chunks, in_order, scaled, with_minimum
from .words import pack_zero_points, unpack_words, zero_point_bytes

__all__ = [
    "FLOAT8",
    "KINDS",
    "MXFP4",
    "NVFP4",
    "ByteWeight",
    "Float4Weight",
    "Float8Weight",
    "Format",
    "Int2Weight",
    "Int3Weight",
    "Int4Weight",
    "Int8Weight",
    "Layout",
    "LowBitWeight",
    "Mxfp4Weight",
    "Nvfp4Weight",
    "QuantizedWeight",
    "check_group_size",
    "chunks",
    "converts",
    "from_state",
    "in_order",
    "kind_of",
    "pack_zero_points",
    "readable",
    "scaled",
    "state",
    "unpack_words",
    "with_minimum",
    "zero_point_bytes",
    "zeros",
]  # fmt: skip

KINDS: dict[str, type[Any]] = {  # by the label of a layout
    "int8": Int8Weight, "fp8": Float8Weight, "int4": Int4Weight, "int3": Int3Weight, "int2": Int2Weight,
    "mxfp4": Mxfp4Weight, "nvfp4": Nvfp4Weight,
}  # fmt: skip


def kind_of(layout: Layout) -> type[Any]:
    """Return the class of weights in a layout."""
    return KINDS[layout.label]


def state(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, by name; no weight_zero_point for a symmetric weight."""
    tensors = {name: getattr(weight, name) for name in (field.name for field in fields(weight))}  # type: ignore[arg-type]
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def converts(dtype: torch.dtype) -> bool:
    """Return whether a tensor of `state` follows the dtype of the model: scales and minima do, the numbers do not."""
    return dtype.is_floating_point and dtype is not FLOAT8


def readable(tensor: Tensor) -> Tensor:
    """Return FP8 as bytes, which most of torch's operators and GPUs before sm_89 need, and other numbers unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype is FLOAT8 else tensor


def from_state(kind: type[Any], tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    """Return the weight of a class of KINDS whose `state` is among `tensors`."""
    names = [f.name for f in fields(kind) if f.default is MISSING or f.name in tensors]
    made: QuantizedWeight = kind(**{name: tensors[name] for name in names})
    return made


def zeros(
    layout: Layout, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device | str
) -> QuantizedWeight:
    """A weight [out, in] of zeros. dtype: of the scales, if the layout does not say it.

    Raises UnsupportedError unless the inputs divide into groups.
    """
    if layout.group_size is not None:
        check_group_size(shape, layout.group_size)
    made: QuantizedWeight = kind_of(layout).empty(layout, shape, dtype=dtype, device=device)
    return made
