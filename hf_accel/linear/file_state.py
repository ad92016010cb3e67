"""The tensors that save_pretrained writes of a model with packed weights, and where they lie in the file.

A reader maps them, and the kernels read the blocks where they lie: processes share them, and nothing is packed. That
needs blocks which begin at lines of the cache, and safetensors aligns to 8 bytes only. So the metadata has as many
blanks as put the first block there; the size of each is a multiple of a line. In a checkpoint of several files the
header of each is another; who reads these copies the blocks that lie elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .blocked import in_blocks, writing
from .formats.blocks import ALIGNMENT
from .layer import QuantModule

BLANKS = "blanks"  # the name in a file's metadata
FORMAT = {"format": "pt"}  # what transformers adds to it
# The dtypes by their names in safetensors, in the order in which it writes their tensors.
WRITTEN = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def file_state(model: nn.Module, layers: Mapping[str, QuantModule]) -> tuple[dict[str, Tensor], list[str]] | None:
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
