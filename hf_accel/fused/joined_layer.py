"""A traced decoder layer on a GPU, in fewer launches than its modules one by one.

The write of K and V shares a launch with the rotation, and a norm with the sum before it: the bits are the same.
Products of few rows with quantized weights share one where they have one input (`row_products.py`). All other
linear layers, and attention, are called as the layer's own code calls them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.storage import KVStorage
from ..recognition.operation import INPUT, OUTPUT, Operation, Span, UntraceableError
from ..recognition.symbols import Opaque
from ..recognition.trace import Trace
from ..undo.state import FUSED
from .modules import add_rms_norm, gate_and_multiply, rope, rope_and_write
from .norms import NativeNorm, NormForms, weight_of
from .row_products import gated_product_of_rows, products_of_rows
from .traced_layer import Attention, TracedLayer

# Computes attention: (module, (q, k, v), options) with q [B, Hq, T, D], k and v [B, H, T, ..] -> [B, T, Hq, Dv].
Attend = Callable[[nn.Module, tuple[Tensor, Tensor, Tensor], dict[str, Any]], Tensor]


def partner(operation: Operation, behind: Operation | None) -> Operation | None:
    """Return the operation that shares a launch with this one: the operation after it, or None."""
    if behind is None or behind.inputs[:1] != operation.outputs[-1:]:
        return None
    match operation.kind, behind.kind:
        case "rope", "write":
            return behind
        case "add", "norm" if operation.values["factor"] == 1 and behind.values["heads"] == 1:
            return behind
    return None


def with_partners(operations: list[Operation]) -> Iterator[tuple[Operation, Operation | None]]:
    """Iterate over the operations, each with its partner. A partner is not listed a second time."""
    taken: Operation | None = None
    for operation, behind in zip(operations, [*operations[1:], None], strict=True):
        if operation is not taken:
            taken = partner(operation, behind)
            yield operation, taken


def together_with(operations: list[Operation]) -> dict[int, list[Operation]]:
    """Return the linear layers that follow one at once and have its input, by the id of that one."""
    found: dict[int, list[Operation]] = {}
    first: Operation | None = None
    for operation in operations:
        if operation.kind != "linear" or operation.values.keys() & {"activation", "vector"}:
            first = None
        elif first is not None and operation.inputs == first.inputs:
            found.setdefault(id(first), []).append(operation)
        else:
            first = operation
    return found


JOINABLE = ("linear", "gated", "norm", "rope", "write", "attend", "add")


def refuse_others(trace: Trace) -> None:
    """Raise UntraceableError for an operation that a JoinedLayer cannot compute."""
    if trace.leaves is not None or trace.taken is not None:
        raise UntraceableError("it shares keys and values with other layers")
    for operation in trace.operations:
        values = operation.values
        is_linear = operation.kind != "linear" or isinstance(operation.modules[0], nn.Linear)
        is_plain = True
        if operation.kind == "attend":
            is_plain = values["factor"] == 1 and not values["biased"]
        elif operation.kind == "rope":
            is_plain = values["kv_heads"] > 0 and not values.get("half_tables")
        known = operation.kind in JOINABLE and is_linear and is_plain and not {"activation", "vector"} & values.keys()
        if not known or any(span.head for span in operation.inputs):
            raise UntraceableError("one of its steps has no call on a GPU")


def joins(operations: list[Operation]) -> frozenset[str]:
    """Return the kinds of operations that have a partner."""
    return frozenset(operation.kind for operation, behind in with_partners(operations) if behind is not None)


class JoinedLayer(TracedLayer):
    """A traced layer on a GPU. following: the norm that gets the layer's output, if it is known.

    Raises UntraceableError for a norm or a rotation that has no kernel.
    """

    max_tokens = sys.maxsize

    def __init__(
        self, trace: Trace, table_dtype: torch.dtype, attention: Attention, *, device: torch.device,
        following: nn.Module | None,
    ) -> None:  # fmt: skip
        super().__init__(trace, table_dtype, attention, device)
        refuse_others(trace)
        if self.others:
            raise UntraceableError("it returns more than its hidden states")
        self.following = following
        self._together = together_with(trace.operations)
        taken = {id(operation) for others in self._together.values() for operation in others}
        self._steps = [step for step in with_partners(trace.operations) if id(step[0]) not in taken]
        for operation in trace.operations:
            match operation.kind:
                case "norm":
                    self.norm_form(operation)
                case "rope":
                    self._rotation = vars(self.rotary_form(operation))
                case "write":
                    self._kv = operation
                case "attend":
                    options = operation.values["options"].items()
                    self._options = {name: value for name, value in options if not isinstance(value, Opaque)}
        self.freeze_reads()

    def __call__(
        self, x: Tensor, tables: tuple[Tensor, Tensor], *, storage: KVStorage, slots: Tensor, attend: Attend
    ) -> Tensor:
        """x: [B, T, hidden]; tables: cos and sin, [B or 1, T, head_dim]; slots: [B * T] int64 -> [B, T, hidden]."""
        held = Held(x)
        for operation, behind in self._steps:
            match operation.kind:
                case "linear":
                    _put_products(held, [operation, *self._together.get(id(operation), ())])
                case "gated":
                    held.put(operation.outputs[0], _gated(held, operation))
                case "norm":
                    held.put(operation.outputs[0], _normed(held, operation))
                case "rope":
                    q, k = held.heads(operation, 0), held.heads(operation, 1)
                    if behind is None:
                        q, k = rope(q, k, *tables, **self._rotation)
                    else:
                        heads = q, k, held.heads(behind, 1)
                        q, k = rope_and_write(heads, tables, storage.pages, slots, **self._rotation)
                    held.put(operation.outputs[0], q.transpose(1, 2))
                    held.put(operation.outputs[1], k.transpose(1, 2))
                case "write":
                    keys, values = (held.heads(operation, i).transpose(1, 2).flatten(0, 1) for i in (0, 1))
                    storage.write(keys, values, slots)
                case "attend":
                    heads = held.heads(operation, 0), held.heads(self._kv, 0), held.heads(self._kv, 1)
                    held.put(operation.outputs[0], attend(operation.modules[0], heads, self._options))
                case "add":
                    self._add(held, operation, behind)
        return held.columns(Span(OUTPUT, 0, self.width), self.width)

    def _add(self, held: Held, operation: Operation, behind: Operation | None) -> None:
        """Compute a sum, together with the norm after it, which is in this layer or begins the next one."""
        (span,), factor = operation.outputs, operation.values["factor"]
        x, y = (held.columns(each, operation.values["dim"]) for each in operation.inputs)
        norm = self.following if behind is None else behind.modules[0]
        # The next layer takes the norm only of this tensor as it is now; in inference mode torch counts no writes.
        is_known = behind is not None or (span.buffer == OUTPUT and not torch.is_inference_mode_enabled())
        form = None
        if isinstance(norm, NativeNorm) and is_known and factor == 1 and x.dtype is y.dtype:
            forms: NormForms = vars(norm)[FUSED]
            form = forms.form(norm, x)
        if form is None:
            held.put(span, x + (y if factor == 1 else y * factor))
            if behind is not None:
                held.put(behind.outputs[0], _normed(held, behind))
            return
        weight = weight_of(norm, x.shape[-1], x.dtype)
        total, normed = add_rms_norm(x, y, weight, form.eps, offset=form.offset, round_first=form.round_first)
        held.put(span, total)
        if behind is not None:
            held.put(behind.outputs[0], normed)
        else:
            forms.leave(total, normed)


class Held:
    """The tensors of one call by buffer, each [B, T, width]."""

    def __init__(self, x: Tensor) -> None:
        self._tensors = {INPUT: x}

    def put(self, span: Span, x: Tensor) -> None:
        """x: [B, T, width] or [B, T, heads, dim]."""
        self._tensors[span.buffer] = x if x.ndim == 3 else x.flatten(2)

    def columns(self, span: Span, width: int) -> Tensor:
        """Return columns of a buffer, [B, T, width]; if these are all, the very tensor that was put."""
        x = self._tensors[span.buffer]
        return x if width == x.shape[-1] else x[..., span.offset : span.offset + width]

    def heads(self, operation: Operation, index: int) -> Tensor:
        """Return an input of rope (q, k), write (k, v) or attend (q), [B, heads, T, dim]."""
        values = operation.values
        count = values["kv_heads"] if (operation.kind, index) == ("rope", 1) else values["heads"]
        dim = values["value_dim"] if (operation.kind, index) == ("write", 1) else values["dim"]
        x = self.columns(operation.inputs[index], count * dim)
        return x.view(*x.shape[:2], count, dim).transpose(1, 2)


def _put_products(held: Held, operations: list[Operation]) -> None:
    """Compute linear layers of one input, each [B, T, out]; of few rows in one launch."""
    linears: list[Any] = [operation.modules[0] for operation in operations]
    x = held.columns(operations[0].inputs[0], linears[0].in_features)
    products = products_of_rows(linears, x) or [linear(x) for linear in linears]
    for operation, product in zip(operations, products, strict=True):
        held.put(operation.outputs[0], product)


def _gated(held: Held, operation: Operation) -> Tensor:
    """Compute the gate and the other half of a gated MLP, [B, T, out]; of few rows in one launch."""
    linears: Any = operation.modules
    x = held.columns(operation.inputs[0], linears[0].in_features)
    if not linears[1:]:
        only: Tensor = linears[0](x)
        return only
    product = gated_product_of_rows(linears, x, operation.values["epilogue"])
    return (
        gate_and_multiply(linears[0](x), linears[1](x), operation.values["epilogue"]) if product is None else product
    )


def _normed(held: Held, operation: Operation) -> Tensor:
    """Compute a norm of all columns, [B, T, width], or of each head, [B, T, heads, dim]."""
    (norm,), heads, dim = operation.modules, operation.values["heads"], operation.values["dim"]
    x = held.columns(operation.inputs[0], heads * dim)
    normed: Tensor = norm(x if heads == 1 else x.view(*x.shape[:2], heads, dim))
    return normed
