"""The operations of a layer as native calls: for each kind, the fields of its struct in the call of a layer, the same
by a call of its own, and what it asks of a layer that is still to be patched.

A new operation is recorded in recognition/record.py, computed by an entry here, and has its number and its C++ in
kernels/cpu/layer_call.py and src/layer.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..hardware import UNLIMITED
from ..kernels.cpu.attention import EVERY_KEY, GatedBias, attend, write_pages
from ..kernels.cpu.float_linear import FloatLinear
from ..kernels.cpu.layer_call import KINDS, NOWHERE
from ..kernels.cpu.library import ACTIVATIONS, DTYPES, EPILOGUES, FLOATS
from ..kernels.cpu.row_kernels import activate, add_layer_norm, layer_norm, rms_norm, rope, rounds_each
from ..kernels.layouts import KV, AttentionOptions
from ..linear import QuantLinear
from ..recognition.operation import Kind, Operation, UntraceableError
from ..recognition.row_convolution import sizes_of_linear
from ..recognition.unchanged import Read
from ..tensors import is_plain_tensor
from ..undo.state import FUSED
from .latent_operations import LATENT_OPERATIONS
from .modules import HALF_TABLES, RotaryForm, form_of_rotation
from .native_operation import HeldRows, ModuleOperation, NativeOperation, NativeParts, Planned, sinks_of
from .norms import NormForm, norm_form, weight_of
from .partial_rotation import leaves_rest, rotation_over_rows
from .projections import NativeConv1D, NativeLinear, make_call, matrix
from .row_operations import ROW_OPERATIONS
from .state_operations import STATE_OPERATIONS
from .sum_operations import SUM_OPERATIONS, vector_address


class ProductOperation(NativeOperation):
    """The product of a linear layer, with the activation of its result; or of several on one input."""

    def refusal(self, operation: Operation, planned: Planned) -> str | None:
        known = planned.linears is None or all(module in planned.linears for module in operation.modules)
        return None if known else "a linear layer has no native call"

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        rows, values = min(_most_rows(layer, parts) for layer in operation.modules), operation.values
        call = make_call(operation.modules, values.get("epilogue"), rows, activation=values.get("activation"))
        if call is None:
            raise UntraceableError("a linear layer has no native call")
        if isinstance(call, FloatLinear) and call.weights[0].dtype is not parts.dtype:
            raise UntraceableError("a linear layer has another dtype than its input")
        parts.calls.append(call)
        parts.max_tokens = min(parts.max_tokens, rows)
        kind = "float_linear" if isinstance(call, FloatLinear) else "integer_linear"
        return {"kind": KINDS[kind], "weight": call.address(), "tile_rows": call.tile_rows}

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        linears: Any = operation.modules
        x = rows.columns(operation.inputs[0], sizes_of_linear(linears[0])[0])
        first, *others = (_product(linear, x) for linear in linears)
        function = operation.values.get("epilogue", operation.values.get("activation"))
        return [first if function is None else activate(first, function, y=others[0] if others else None)]


def _product(layer: Any, x: Tensor) -> Tensor:
    """Return what a layer returns for more rows than its native call takes; its hooks are known to be none."""
    kind = type(layer)
    if not issubclass(kind, NativeLinear) or issubclass(kind, NativeConv1D):
        result: Tensor = layer(x)
        return result
    # Small products, as MobileBERT's, take about as long as the code of the module around them.
    parameters: dict[str, Any] = vars(layer)["_parameters"]
    return F.linear(x, matrix(parameters["weight"]), parameters["bias"])


def _most_rows(layer: nn.Module, parts: NativeParts) -> int:
    """Return the most rows of a native call of a linear layer, and note what the call depends on."""
    own, parameters = vars(layer), layer._parameters
    rows = UNLIMITED
    parts.note(parameters, "bias")
    if "bias" not in parameters or (isinstance(layer, NativeLinear) and parameters.get("weight") is None):
        parts.note(parameters, "weight")
        raise UntraceableError("a linear layer computes its weight or bias")  # by prune or a parametrization
    if type(layer) is QuantLinear:
        parts.note(own, "_packed")
        parts.reads.append(Read(own, "choice", layer.choice))
        if layer.choice is None or layer.choice.spec.dtype is not parts.dtype:
            raise UntraceableError("a linear layer has another dtype than its input")
    elif isinstance(layer, NativeLinear):
        parts.note(parameters, "weight")
        rows = own[FUSED].float_rows
    else:
        raise UntraceableError("a linear layer has no native call")
    parts.tensors += [tensor for tensor in parameters.values() if tensor is not None]
    return rows


class NormOperation(NativeOperation):
    """An RMSNorm of a row, or of each of its heads."""

    def refusal(self, operation: Operation, planned: Planned) -> str | None:
        return None if norm_form(operation.modules[0], planned.dtype) is not None else "a norm has no native call"

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        form = parts.norm_form(operation)
        weight = weight_of(operation.modules[0], operation.values["dim"], parts.dtype)
        return {
            "weight": parts.address(weight), "weight_dtype": DTYPES[weight.dtype],
            "heads": operation.values["heads"], "dim": operation.values["dim"], "eps": form.eps,
            "offset": form.offset, "round_first": form.round_first,
        }  # fmt: skip

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        form = rows.parts.forms[id(operation)]
        assert isinstance(form, NormForm)
        weight = weight_of(operation.modules[0], operation.values["dim"], rows.parts.dtype)
        x = rows.heads(operation.inputs[0], operation.values["heads"], operation.values["dim"])
        return [rms_norm(x, weight, form.eps, offset=form.offset, round_first=form.round_first).flatten(1)]


class LayerNormOperation(NativeOperation):
    """A LayerNorm of a row, or of each of its heads. If it has two inputs, it is that of their sum, which is the
    second result if it is read again.
    """

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        (norm,) = operation.modules
        values = operation.values
        fields: dict[str, Any] = {name: values[name] for name in ("heads", "dim", "eps", "offset")}
        fields["ahead"] = values["dim"] if values["by_head"] else 0
        for name in ("weight", "bias"):
            tensor = norm._parameters.get(name)
            parts.note(norm._parameters, name)
            if name not in norm._parameters and type(norm) is nn.LayerNorm:
                raise UntraceableError("a norm computes its weight or bias")
            if tensor is None:
                continue
            if not is_plain_tensor(tensor) or not tensor.is_cpu or tensor.dtype not in FLOATS:
                raise UntraceableError("a norm has no native call")
            if not tensor.is_contiguous():
                raise UntraceableError("a norm has no native call")
            fields |= {name: parts.address(tensor), f"{name}_dtype": DTYPES[tensor.dtype]}
        return fields

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        parameters, values = operation.modules[0]._parameters, operation.values
        weight, bias = parameters.get("weight"), parameters.get("bias")
        eps, offset, heads = values["eps"], values["offset"], values["heads"]
        if heads > 1:
            each = rows.heads(operation.inputs[0], heads, values["dim"])
            if not values["by_head"]:
                return [layer_norm(each, weight, bias, eps, offset=offset).flatten(1)]
            weights, biases = (heads * [None] if tensor is None else tensor for tensor in (weight, bias))
            parts = zip(each.unbind(1), weights, biases, strict=True)
            return [torch.cat([layer_norm(x, w, b, eps, offset=offset) for x, w, b in parts], dim=1)]
        x, y = [*(rows.columns(span, values["dim"]) for span in operation.inputs), None][:2]
        assert x is not None
        if len(operation.outputs) == 2:
            assert y is not None
            return list(add_layer_norm(x, y, weight, bias, eps=eps, offset=offset))
        return [layer_norm(x, weight, bias, eps, y=y, offset=offset)]


class RotationOperation(NativeOperation):
    """A rotation of queries and keys, or of one of them, by cos and sin."""

    def refusal(self, operation: Operation, planned: Planned) -> str | None:
        function = operation.values["function"]
        dtype, tables = planned.dtype, operation.values.get("tables")
        if planned.over_rows:
            known = rotation_over_rows(function, dtype, dtype) is not None
        else:
            table_dtype = dtype if tables is None else tables.dtype
            known = form_of_rotation(function, dtype, table_dtype, planned.device_type) is not None
        known = known and (not operation.values["partial"] or leaves_rest(function))
        return None if known else "its rotation has no native call"

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        form = parts.rotary_form(operation)
        assert parts.table_dtype is not None
        values, interleaved = operation.values, int(form.interleaved)
        if values.get("half_tables"):
            if interleaved or parts.table_size != values["dim"] // 2:
                raise UntraceableError("its rotation has no native call")
            interleaved = HALF_TABLES
        return {name: values[name] for name in ("heads", "kv_heads", "dim")} | {
            "interleaved": interleaved,
            "round_each": rounds_each(parts.dtype, parts.table_dtype, round_each=form.round_each),
        }

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        values, form = operation.values, rows.parts.forms[id(operation)]
        assert isinstance(form, RotaryForm)
        assert rows.tables is not None
        tensors = [
            rows.heads(span, values[heads], values["dim"]).transpose(0, 1)[None]
            for span, heads in zip(operation.inputs, ("heads", "kv_heads"), strict=False)
        ]
        q, k = [*tensors, tensors[0][:, :0]][:2]
        rotated = rope(q, k, *rows.tables, interleaved=form.interleaved, round_each=form.round_each)
        return [each[0].transpose(0, 1).reshape(q.shape[2], -1) for each in rotated[: len(tensors)]]


class WriteOperation(NativeOperation):
    """The write of keys and values to a cache."""

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        values = operation.values
        return {"kv_heads": values["heads"], "dim": values["dim"], "value_dim": values["value_dim"]}

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        assert rows.written is not None
        heads, sizes = operation.values["heads"], (operation.values["dim"], operation.values["value_dim"])
        keys, values = (rows.heads(span, heads, dim) for span, dim in zip(operation.inputs, sizes, strict=True))
        write_pages(keys, values, KV(rows.written.k, rows.written.v), rows.written.slots)
        return []


class AttendOperation(NativeOperation):
    """Attention, to the keys of pages or to those of the call's own rows."""

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        fields = {name: operation.values[name] for name in ("heads", "kv_heads", "dim", "value_dim")}
        fields |= {name: value or 0 for name, value in parts.attention._asdict().items()}
        if parts.over_rows:
            return fields | {"kind": KINDS["attend_rows"]}
        sinks = sinks_of(operation)
        if sinks is not None:
            fields |= {"weight": vector_address(sinks, parts), "weight_dtype": DTYPES[sinks.parameter.dtype]}
        # Keys and values in pages have no place in the memory of the call.
        return fields | {"y": NOWHERE, "z": NOWHERE, "gate_first": "made" in operation.values}

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        values, (scale, softcap, window, ahead), layout = operation.values, rows.parts.attention, rows.layout
        heads = (values["heads"], values["kv_heads"], values["kv_heads"])
        spans, gates = operation.inputs[:3], operation.inputs[3:]
        q, k, v = (rows.heads(span, n, values["dim"]) for span, n in zip(spans, heads, strict=True))
        options = AttentionOptions(scale, causal=not ahead, window=window, softcap=softcap)
        seen = None if ahead in (0, EVERY_KEY) else ahead
        kv = KV(layout.keys_of(k), layout.keys_of(v))
        bias = GatedBias(rows.bias, rows.buffers[gates[0].buffer]) if gates else rows.bias
        return [attend(q, kv, options, layout.ragged, ahead=seen, bias=bias).flatten(1)]


class AttendSourceOperation(NativeOperation):
    """Attention to all keys that pages hold of an encoder's output."""

    over_rows = False

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        attention = parts.source_attention
        if parts.over_rows or attention is None:
            raise UntraceableError("its attention to an encoder's output has no native call")
        fields = {name: operation.values[name] for name in ("heads", "kv_heads", "dim", "value_dim")}
        return fields | {"scale": attention.scale, "softcap": attention.softcap or 0, "ahead": EVERY_KEY}


class GateOperation(NativeOperation):
    """act(x) * y, or act(x) where there is no y, or x * y where the activation is None."""

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        values = operation.values
        activation = values["activation"]
        number = EPILOGUES[None] if activation is None else ACTIVATIONS[activation]
        return {"heads": values["heads"], "dim": values["dim"], "activation": number}

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        width = operation.values["heads"] * operation.values["dim"]
        x, y = [*(rows.columns(span, width) for span in operation.inputs), None][:2]
        assert x is not None
        activation = operation.values["activation"]
        if activation is None:
            assert y is not None
            return [x * y]
        return [activate(x, activation, y=y)]


class JoinOperation(NativeOperation):
    """The numbers of each head of y behind those of x."""

    over_rows = False

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        return {name: operation.values[name] for name in ("heads", "dim", "value_dim")}


class TakeHeadsOperation(NativeOperation):
    """Columns of each head, end to end: a join with nothing behind them."""

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        return {"kind": KINDS["join"], "heads": operation.values["heads"], "dim": operation.values["dim"]}

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        (span,), dim = operation.inputs, operation.values["dim"]
        buffer = rows.buffers[span.buffer]
        heads = buffer.view(len(buffer), operation.values["heads"], span.head)
        return [heads.narrow(2, span.offset, dim).flatten(1)]


NATIVE: dict[Kind, NativeOperation] = {
    "linear": ProductOperation(),
    "gated": ProductOperation(),
    "norm": NormOperation(),
    "layer_norm": LayerNormOperation(),
    "rope": RotationOperation(),
    "write": WriteOperation(),
    "attend": AttendOperation(),
    "gate": GateOperation(),
    "join": JoinOperation(),
    "take_heads": TakeHeadsOperation(),
    "attend_source": AttendSourceOperation(),
    **ROW_OPERATIONS,
    **SUM_OPERATIONS,
    "module": ModuleOperation(),
    **STATE_OPERATIONS,
    **LATENT_OPERATIONS,
}


def refuse_without_kernel(operations: Iterable[Operation], planned: Planned) -> None:
    """Raise UntraceableError for what a native layer would refuse in one that is still to be patched."""
    for operation in operations:
        reason = NATIVE[operation.kind].refusal(operation, planned)
        if reason is not None:
            raise UntraceableError(reason)


def refuse_over_rows(operations: Iterable[Operation]) -> None:
    """Raise UntraceableError for an operation that has no native call over rows."""
    for operation in operations:
        dim = operation.values.get("dim")
        if operation.values.get("wide"):
            raise UntraceableError("it computes in another dtype")
        if not NATIVE[operation.kind].over_rows or operation.values.get("value_dim", dim) != dim:
            raise UntraceableError(f"{operation.kind} has no native call over rows")
        if sinks_of(operation) is not None:
            raise UntraceableError("attention with sinks has no native call over rows")
        if operation.values.get("tables") is not None:
            raise UntraceableError("cos and sin that it keeps have no native call over rows")
        if operation.values.get("half_tables"):
            raise UntraceableError("tables of half a head have no native call over rows")
        if operation.kind != "take_heads" and any(span.head for span in operation.inputs):
            raise UntraceableError("it takes parts of heads")
