"""Sums, products with numbers and roundings of tensors as native calls, by the kernel of sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..kernels.cpu.layer_call import KINDS
from ..kernels.cpu.row_kernels import add
from ..recognition.operation import Kind, Operation, UntraceableError
from ..recognition.symbols import Vector
from ..recognition.unchanged import Read
from ..tensors import is_plain_tensor
from .native_operation import HeldRows, NativeOperation, NativeParts


class SumOperation(NativeOperation):
    """x + factor * y, or x + vector * y."""

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        fields: dict[str, Any] = {"dim": operation.values["dim"], "scale": operation.values["factor"]}
        fields["round_first"] = operation.values.get("wide", False)
        vector: Vector | None = operation.values.get("vector")
        return fields if vector is None else fields | {"weight": vector_address(vector, parts)}

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        x, y = (rows.columns(span, operation.values["dim"]) for span in operation.inputs)
        vector: Vector | None = operation.values.get("vector")
        return [add(x, y, operation.values["factor"] if vector is None else vector.parameter)]


def vector_address(vector: Vector, parts: NativeParts) -> int:
    """Return where the numbers of columns are, and note that they are read."""
    tensor = vector.parameter
    parts.reads.append(Read(vector.owner, vector.name, tensor))
    if not is_plain_tensor(tensor) or not tensor.is_cpu or not tensor.is_contiguous():
        raise UntraceableError("a parameter of columns has no native call")
    return parts.address(tensor)


class AffineOperation(NativeOperation):
    """vector * x + bias, or x + bias where there is no vector, by the kernel of sums."""

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        vector, bias = operation.values["vector"], operation.values["bias"]
        weight = parts.address(torch.ones_like(bias.parameter)) if vector is None else vector_address(vector, parts)
        return {
            "kind": KINDS["add"],
            "dim": operation.values["dim"],
            "weight": weight,
            "bias": vector_address(bias, parts),
        }

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        values, x = operation.values, rows.columns(operation.inputs[0], operation.values["dim"])
        vector, bias = values["vector"], values["bias"].parameter.flatten()
        return [x + bias if vector is None else add(bias, x, vector.parameter)]


class MultiplyOperation(NativeOperation):
    """factor * x, or vector * x, by the kernel of sums. A vector may be one number for all columns."""

    over_rows = False

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        values, vector = operation.values, operation.values["vector"]
        if vector is None:
            return {"dim": values["dim"], "scale": values["factor"]}
        numbers = vector.parameter.numel()
        return {"dim": values["dim"], "weight": vector_address(vector, parts), "value_dim": numbers}


class ConvertOperation(NativeOperation):
    """x in float32, or a float32 x rounded, by the kernel of sums."""

    over_rows = False

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        wide = operation.values["wide"]
        found = {"kind": KINDS["multiply"], "dim": operation.values["dim"], "scale": 1.0}
        return found | {"round_first": wide, "round_each": not wide}


SUM_OPERATIONS: Mapping[Kind, NativeOperation] = {
    "add": SumOperation(),
    "affine": AffineOperation(),
    "multiply": MultiplyOperation(),
    "convert": ConvertOperation(),
}
