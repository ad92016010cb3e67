"""The results inside a float32 layer of quantized weights that are kept in bfloat16.

A product of quantized weights rounds its inputs to INT8. What only such products, rotations, gates and attention
write and read can be bfloat16 besides: that rounds less. It needs half the memory, and attention multiplies two of its
numbers at once. The hidden states between layers, norms, and what is added stay float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.cpu.layer_call import KINDS, LayerOp
from ..kernels.cpu.library import level_in_use, refusal
from ..recognition.operation import OUTPUT

PRODUCT, FLOAT_PRODUCT = KINDS["integer_linear"], KINDS["float_linear"]
# Of these, what they write and all that they read is of one dtype.
OF_ONE_DTYPE = {
    KINDS["rope"]: ("x", "y", "out", "out2"), KINDS["attend_rows"]: ("x", "y", "z", "out"),
    KINDS["gate"]: ("x", "y", "out"),
}  # fmt: skip
PLACES = ("x", "y", "z", "out", "out2")


def keeps_halves(dtype: torch.dtype) -> bool:
    """Return whether layers of this dtype and quantized weights may keep results in bfloat16 on this CPU."""
    return dtype is torch.float32 and refusal() is None and level_in_use().pairs_of_bfloat16


def half_buffers(operations: Sequence[LayerOp], dtype: torch.dtype) -> set[int]:
    """Return the buffers of a layer's call that hold bfloat16, though it computes in `dtype`, and say so in the
    operations that write and read them.
    """
    if not keeps_halves(dtype):
        return set()
    if any(operation.kind == FLOAT_PRODUCT for operation in operations):
        return set()  # with many rows torch multiplies by it, and the layer runs operation by operation, in float32
    halves = {buffer for operation in operations for buffer in _buffers(operation) if buffer > OUTPUT}
    others = halves
    while others:
        others = halves & {buffer for operation in operations for buffer in _others(operation, halves)}
        halves = halves - others
    for operation in operations:
        operation.halves_in, operation.halves_out = operation.x.buffer in halves, operation.out.buffer in halves
        if operation.halves_out and operation.kind != PRODUCT:
            operation.round_each = False  # a rotation is rounded once
    return halves


def _buffers(operation: LayerOp, places: Sequence[str] = PLACES) -> set[int]:
    found = (getattr(operation, place) for place in places)
    return {place.buffer for place in found if place.stride}


def _others(operation: LayerOp, halves: set[int]) -> set[int]:
    """Return the buffers that this operation needs in the dtype of the call."""
    if operation.kind == PRODUCT:
        return set()
    used, of_one = _buffers(operation), _buffers(operation, OF_ONE_DTYPE.get(operation.kind, ()))
    return used - of_one if of_one <= halves else used
