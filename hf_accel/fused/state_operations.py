"""The operations of layers with a recurrent state as native calls, and those of convolutions over inputs in pages; see
kernels/cpu for what each computes.

Convolutions in front of a state, rules and scans give float32, whatever the dtype of the layer: a result of so many
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..kernels.cpu.float_linear import FloatLinear
from ..kernels.cpu.layer_call import KINDS
from ..kernels.cpu.library import ACTIVATIONS, DTYPES, FLOATS
from ..recognition.operation import Kind, Operation, UntraceableError
from ..tensors import is_plain_tensor
from .native_operation import NativeOperation, NativeParts


def _tensor(operation: Operation, parts: NativeParts, name: str) -> dict[str, Any]:
    """Return the fields of a parameter that an operation reads in place. Raises UntraceableError for one that it
    cannot read so.
    """
    tensor: Tensor | None = operation.values[name]
    if tensor is None:
        return {}
    if not is_plain_tensor(tensor) or not tensor.is_cpu or tensor.dtype not in FLOATS or not tensor.is_contiguous():
        raise UntraceableError("a parameter has no native call")
    return {name: parts.address(tensor), f"{name}_dtype": DTYPES[tensor.dtype]}


class StateOperation(NativeOperation):
    """An operation that reads and writes what pages hold of a sequence, or the norm behind it.

    sizes: the values that are fields of its struct as they are. tensors: those that are parameters.
    """

    over_rows = False

    def __init__(self, sizes: str, tensors: str) -> None:
        self.sizes, self.tensors = sizes.split(), tensors.split()

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        found = {name: operation.values[name] for name in self.sizes}
        for name in self.tensors:
            found |= _tensor(operation, parts, name)
        if "activation" in operation.values:
            found["activation"] = ACTIVATIONS[operation.values["activation"]]
        return found


class ConvolutionOperation(StateOperation):
    """A short convolution, whose bias has the dtype of its weight."""

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        found = super().fields(operation, parts)
        if found.get("bias_dtype", found["weight_dtype"]) != found["weight_dtype"]:
            raise UntraceableError("a convolution has a bias of another dtype")
        return found


class TimeStepsOperation(NativeOperation):
    """x times a weight in place."""

    over_rows = False

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        weight: Tensor = operation.values["weight"]
        _tensor(operation, parts, "weight")
        if weight.dtype is not parts.dtype:
            raise UntraceableError("a parameter has another dtype than its input")
        call = FloatLinear([weight], [None])
        parts.calls.append(call)
        return {"kind": KINDS["float_linear"], "weight": call.address(), "tile_rows": call.tile_rows}


STATE_OPERATIONS: Mapping[Kind, NativeOperation] = {
    "short_conv": ConvolutionOperation("dim value_dim", "weight bias"),
    "delta_rule": StateOperation("heads kv_heads dim value_dim scale", "weight bias"),
    "state_scan": StateOperation("heads kv_heads dim value_dim eps offset", "weight bias skip"),
    "page_conv": ConvolutionOperation("dim value_dim", "weight bias"),
    "time_steps": TimeStepsOperation(),
    "gated_norm": StateOperation("heads dim value_dim eps round_first gate_first", "weight"),
}
