"""The tensors of a quantized layer as a state_dict and a file hold them: in the stored form, or in blocks.

A reader maps a file, and the kernels read the blocks where they lie: processes share them, and nothing is packed. That
needs blocks which begin at lines of the cache, and safetensors aligns to 8 bytes only. So the metadata has as many
blanks as put the first block there; the size of each is a multiple of a line. In a checkpoint of several files the
header of each is another; who reads these copies the blocks that lie elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import fields, replace
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..config import Activations, Layout
from .backends.backend import LinearSpec
from .formats import QuantizedWeight, converts, from_state, state
from .formats.blocks import ALIGNMENT, Blocks, tensors_of

BLANKS = "blanks"  # the name in a file's metadata
FORMAT = {"format": "pt"}  # what transformers adds to it
# The dtypes by their names in safetensors, in the order in which it writes their tensors.
WRITTEN = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


# -- blocks, as they come from a file, and as they go into one -------------------------------------------


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


def put_stored(layer: Holder, weight: QuantizedWeight) -> None:
    """Let the buffers of a layer hold the stored form of this weight instead of another one."""
    stored = state(weight)
    for name in weight_names(layer):
        del layer._buffers[name]
    layer._buffers.update(stored)


def not_packed(layer: Holder) -> QuantizedWeight:
    """Return the stored form of a weight that was loaded, in this form or in blocks."""
    blocks = loaded_blocks(layer)
    if layer.layout_of_blocks is None or blocks is None:
        return from_state(layer.kind, layer._buffers)  # type: ignore[arg-type]
    shape = (layer.out_features // layer.experts, layer.in_features)
    return blocks.stored(layer.layout_of_blocks, shape, experts=layer.experts)


def spec_of_blocks(layer: Holder) -> LinearSpec | None:
    """Return the spec of the blocks that were loaded into a layer; None if there are none."""
    blocks = loaded_blocks(layer)
    if layer.layout_of_blocks is None or blocks is None:
        return None
    layout, scale = layer.layout_of_blocks, blocks.weight_scale
    return LinearSpec(
        in_features=layer.in_features, out_features=layer.out_features, dtype=layer.dtype,
        layout=layout if layout.scale_dtype is scale.dtype else replace(layout, scale_dtype=scale.dtype),
        device_type=scale.device.type, activations=layer.activations,
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


# -- the file ------------------------------------------------------------------------------------------


def file_state(model: nn.Module, layers: Mapping[str, Holder]) -> tuple[dict[str, Tensor], list[str]] | None:
    """Return the state_dict for a file, and the names of the layers that are in blocks there; None if no layer is."""
    found = {name: blocks for name, layer in layers.items() if (blocks := in_blocks(layer)) is not None}
    token = writing.set({id(layers[name]): blocks for name, blocks in found.items()})
    try:
        return (model.state_dict(), list(found)) if found else None
    finally:
        writing.reset(token)


def blanks(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the metadata that puts the first of the blocks at a line, in one file that holds these tensors."""
    if any(tensor.dtype not in WRITTEN for tensor in tensors.values()):
        return {}
    order = list(WRITTEN)
    entries: dict[str, Any] = {"__metadata__": {**FORMAT, BLANKS: ""}}
    end = first = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0])):
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        entries[name] = {"dtype": WRITTEN[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
        if not first and name.endswith(".weight_blocks"):
            first = start
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    return {BLANKS: " " * (-(8 + len(header) + first) % ALIGNMENT)}  # 8: the size of the header comes before it


# -- what a layer refuses in a state_dict ----------------------------------------------------------------


class RankPart(NamedTuple):
    """The part of a weight that is split over processes: that of one process."""

    rank: int
    ranks: int

    def __str__(self) -> str:
        return f"rank_{self.rank}_of_{self.ranks}"


def wrong_tensors(weight: QuantizedWeight, state_dict: Mapping[str, Any], prefix: str, own: str) -> list[str]:
    """Return why a layer cannot take tensors of these names and dtypes, as clauses. weight: the one that it has.

    own: the prefix of the layer's tensors, which is longer than `prefix` for a part of a weight.
    """
    return _wrong_part(state_dict, prefix, own) or _wrong_dtypes(weight, state_dict, own)


def _wrong_part(state_dict: Mapping[str, Any], prefix: str, own: str) -> list[str]:
    """Refuse the parts of other ranks, and whole weights, which torch would ignore if it is not strict."""
    if own == prefix:
        wrong = [key for key in state_dict if key.startswith(f"{prefix}rank_")]
    else:
        wrong = [key for key in state_dict if key.startswith(prefix) and not key.startswith(own)]
    return [
        f"{key} is not for this model, which stores {own}weight; give each rank what the same rank of as many has "
        "saved, or patch a model that has read the float checkpoint"
        for key in wrong[:1]
    ]


def _wrong_dtypes(weight: QuantizedWeight, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
    """Refuse a float weight, which torch would copy into the stored numbers as if its scales were 1."""
    stored, kind = state(weight).items(), weight.layout.label.upper()
    loaded = [(name, own, state_dict[prefix + name]) for name, own in stored if prefix + name in state_dict]
    return [
        f"{prefix}{name} is {other.dtype} in the checkpoint, but an {kind} layer stores {own.dtype}; "
        "load a checkpoint that was saved quantized"
        for name, own, other in loaded
        if (converts(own.dtype), own.is_floating_point()) != (converts(other.dtype), other.is_floating_point())
    ]


def keep_for_child(tensors: Any) -> None:
    """A process that is being started (spawn) gets tensors by file descriptors: they must not be closed until then."""
    starting = get_spawning_popen()
    if starting is not None:
        vars(starting).setdefault("_hf_accel_tensors", []).append(tensors)
