"""The end of a traced decoder layer that calls a module, such as the experts of a mixture: its operations one by one.

All that does not depend on what the module gives is one native call before.
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
    """Return the operations of one native call, and those that read what a module gives which is called, it first; all
    and none, if none is called.

    Raises UntraceableError if the others are not all known, or read a part of what the native call makes.
    """
    made, head, tail = set[int](), list[Operation](), list[Operation]()
    for operation in operations:
        behind = operation.kind == "module" or any(span.buffer in made for span in operation.inputs)
        made |= {span.buffer for span in operation.outputs if behind}
        (tail if behind else head).append(operation)
    known = all(operation.kind in BEHIND and not operation.values.get("wide") for operation in tail)
    whole = all(span == Span(span.buffer, 0, widths[OUTPUT]) for operation in tail for span in operation.inputs)
    if not known or not whole or (tail and not kept_of(tail)):
        raise UntraceableError("it calls a module in the middle of what is one native call")
    return head, tail


def kept_of(tail: Sequence[Operation]) -> list[int]:
    """Return the buffers that operations behind a native call read of it."""
    made = {span.buffer for operation in tail for span in operation.outputs}
    return sorted({span.buffer for operation in tail for span in operation.inputs} - made - {INPUT})


class LayerTail:
    """Operations behind a native call. parts: the layer; operations are noted as parts of it. kept: the buffers that
    they read of the native call.
    """

    def __init__(self, operations: list[Operation], parts: NativeParts) -> None:
        self._operations, self._parts = operations, parts
        self.kept = kept_of(operations)
        for operation in operations:
            if operation.kind != "module":
                NATIVE[operation.kind].fields(operation, parts)  # which notes what it reads, or raises

    @property
    def called(self) -> list[nn.Module]:
        """The modules that are called."""
        return [module for operation in self._operations if operation.kind == "module" for module in operation.modules]

    def __call__(self, x: Tensor, made: Tensor) -> Tensor | None:
        """x: the layer's input, [B, Q, hidden], made: the `kept`, [K, B, Q, hidden] -> [B, Q, hidden].

        None if a module returns something else than a tensor of its input's shape.
        """
        rows = HeldRows(self._parts, x.flatten(0, 1))
        rows.buffers |= zip(self.kept, made.flatten(1, 2), strict=True)
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
