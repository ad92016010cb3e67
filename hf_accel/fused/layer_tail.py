"""The end of a traced decoder layer that calls a module, such as the experts of a mixture: its operations one by one.

What comes before is one native call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..recognition.operation import INPUT, OUTPUT, Operation, Span, UntraceableError
from .native_operation import HeldRows, NativeParts
from .operations import NATIVE

BEHIND = ("module", "norm", "layer_norm", "add")


def split(operations: Sequence[Operation], widths: Sequence[int]) -> tuple[list[Operation], list[Operation]]:
    """Return the operations of one native call, and those from a module on that is called; all and none, if none is.

    The first ones end with what the others read, besides the layer's input, where the layer's output is. Raises
    UntraceableError if that is more than one tensor, or if the others are not all known.
    """
    first = next((i for i, operation in enumerate(operations) if operation.kind == "module"), None)
    if first is None:
        return list(operations), []
    for end in range(first, 0, -1):
        head, tail = list(operations[:end]), list(operations[end:])
        made = {span.buffer for operation in tail for span in operation.outputs}
        read = {span.buffer for operation in tail for span in operation.inputs} - made - {INPUT}
        whole = [Span(buffer, 0, widths[buffer]) for buffer in read]
        if any(operation.kind not in BEHIND or operation.values.get("wide") for operation in tail):
            break
        if len(whole) == 1 and head[-1].outputs == whole and whole[0].stride == widths[OUTPUT]:
            return [_moved(each, whole[0]) for each in head], tail
    raise UntraceableError("it calls a module in the middle of what is one native call")


def _moved(operation: Operation, span: Span) -> Operation:
    """Return an operation that writes to the layer's output where it wrote to `span`."""
    if operation.outputs == [span]:
        operation.outputs[0] = Span(OUTPUT, 0, span.stride)
    return operation


class LayerTail:
    """Operations behind a native call. parts: the layer; operations are noted as parts of it."""

    def __init__(self, operations: list[Operation], parts: NativeParts) -> None:
        self._operations, self._parts = operations, parts
        (self._read,) = {s.buffer for o in operations for s in o.inputs} - {
            s.buffer for o in operations for s in o.outputs
        } - {INPUT}  # fmt: skip
        for operation in operations:
            if operation.kind != "module":
                NATIVE[operation.kind].fields(operation, parts)  # which notes what it reads, or raises

    @property
    def called(self) -> list[nn.Module]:
        """The modules that are called."""
        return [module for operation in self._operations if operation.kind == "module" for module in operation.modules]

    def __call__(self, x: Tensor, made: Tensor) -> Tensor | None:
        """x: the layer's input, made: what the native call made, both [B, Q, hidden] -> [B, Q, hidden].

        None if a module returns something else than a tensor of its input's shape.
        """
        rows = HeldRows(self._parts, x.flatten(0, 1))
        rows.buffers[self._read] = made.flatten(0, 1)
        for operation in self._operations:
            if operation.kind == "module":
                returned = _called(operation, rows.columns(operation.inputs[0], x.shape[-1]).view(x.shape))
                if returned is None:
                    return None
                results = [returned]
            else:
                results = NATIVE[operation.kind].compute(operation, rows)
            for span, result in zip(operation.outputs, results, strict=True):
                rows.buffers[span.buffer] = result
        return rows.buffers[OUTPUT].view(x.shape)


def _called(operation: Operation, x: Tensor) -> Tensor | None:
    """Return what a module returns, as rows; None if it is not what the trace expects."""
    count = operation.values["results"]
    returned: Any = operation.modules[0](x)
    known = count is None or (isinstance(returned, tuple) and len(returned) == count)
    out = returned[0] if known and count is not None else returned
    if not known or type(out) is not Tensor or out.shape != x.shape or out.dtype is not x.dtype:
        return None
    return out.flatten(0, 1)
