"""Joins the operations of a trace where one call computes several of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .operation import Operation, UntraceableError


def folded(operations: Sequence[Operation]) -> list[Operation]:
    """Let each product end with the activation of its result, each norm begin with the sum that it normalizes, and
    each sum with the scales of the columns that it adds.
    """
    readers = Counter(span.buffer for operation in operations for span in operation.inputs)
    done: list[Operation] = []
    for operation in operations:
        last = done[-1] if done and operation.inputs == done[-1].outputs else None
        read = 0 if last is None else readers[last.outputs[0].buffer]
        if operation.kind == "activation":
            if last is None or last.kind != "linear" or read > 1:
                raise UntraceableError("an activation follows no product")
            done[-1] = replace(last, outputs=operation.outputs, values=last.values | operation.values)
        elif operation.kind == "add" and done and done[-1].kind == "scale":
            done[-1] = _scaled_sum(operation, done[-1], readers)
        elif last is not None and (operation.kind, last.kind) == ("layer_norm", "add") and _is_plain(last):
            kept = last.outputs if read > 1 else []
            done[-1] = replace(operation, inputs=last.inputs, outputs=[*operation.outputs, *kept])
        else:
            done.append(replace(operation, outputs=list(operation.outputs)))
    return done


def _is_plain(operation: Operation) -> bool:
    """Return whether a sum is that of two tensors as they are."""
    return bool(operation.values["factor"] == 1) and "vector" not in operation.values


def _scaled_sum(operation: Operation, scale: Operation, readers: Mapping[int, int]) -> Operation:
    """Return a sum whose second term is what `scale` multiplies."""
    others = [span for span in operation.inputs if span != scale.outputs[0]]
    if len(others) != 1 or readers[scale.outputs[0].buffer] > 1 or not _is_plain(operation):
        raise UntraceableError("scaled columns are not added once")
    return replace(operation, inputs=[*others, *scale.inputs], values=operation.values | scale.values)
