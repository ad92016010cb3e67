"""A traced decoder layer as one native call on the CPU: its operations as C structs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cache.group import GroupStep
from ..kernels.cpu.attention import NO_BIAS
from ..kernels.cpu.decoder_layer import OPERATIONS, run_layer
from ..kernels.cpu.float_linear import FloatLinear
from ..kernels.cpu.library import DTYPES, FLOATS, Columns, LayerOp, threads
from ..kernels.cpu.row_kernels import rounds_each
from ..kernels.layouts import KV
from ..linear import QuantLinear
from ..recognition.encoder_trace import folded
from ..recognition.operation import OUTPUT, Operation, Span, UntraceableError
from ..recognition.trace import Trace
from ..recognition.unchanged import Read
from ..tensors import is_plain_tensor
from ..undo.state import FUSED
from .projections import UNLIMITED, NativeCall, NativeLinear, make_call
from .traced_layer import Attention, TracedForms, TracedLayer

# The most tokens of a call: with more, the time between the kernels is negligible, and the call's memory
# would be large.
MOST_TOKENS = 256
ALIGNED = 32  # numbers; as many of any dtype are whole cache lines
KINDS = {name: number for number, name in enumerate(OPERATIONS)}


class CallFields(NamedTuple):
    """Fields of the struct of a native call that are the same for layers of one kind in one pass.

    held: tensors whose addresses are among them.
    """

    tables: tuple[int, ...]
    step: tuple[int, ...]
    threads: int
    held: tuple[Tensor, ...]

    @staticmethod
    def of(x: Tensor, tables: tuple[Tensor, Tensor] | None, step: GroupStep, block_size: int) -> CallFields:
        """x: [B, Q, hidden], contiguous; tables: cos and sin, [B or 1, Q, head_dim]."""
        batch, tokens = x.shape[0], x.shape[0] * x.shape[1]
        places = (0, 0, tokens, batch, 0, 0)
        if tables is not None:
            cos, sin = tables
            if cos.stride(-1) != 1 or sin.stride() != cos.stride():
                cos, sin = tables = cos.contiguous(), sin.contiguous()
            strides = cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)
            places = (cos.data_ptr(), sin.data_ptr(), tokens, batch, *strides)
        slots, ragged = step.slots, step.ragged
        table = ragged.block_table
        assert table is not None
        held = (slots, table, ragged.cu_q, ragged.kv_len)
        pages = (*(tensor.data_ptr() for tensor in held), table.stride(0), len(table), block_size)
        return CallFields(places, pages, threads(), (*(tables or ()), *held))


def buffer_starts(operations: Sequence[LayerOp], widths: Sequence[int]) -> tuple[list[int], int]:
    """Return where the buffers of a call begin, in numbers of a token, and how many numbers there are in all.

    Buffers share memory if the last operation that uses the one comes before the first that uses the other. So a call
    needs less of the caches. The layer's input and output are not among them and begin at 0.
    """
    used: dict[int, list[int]] = {}
    for index, operation in enumerate(operations):
        for place in (operation.x, operation.y, operation.z, operation.out, operation.out2):
            if place.stride and place.buffer > OUTPUT:
                used.setdefault(place.buffer, []).append(index)
    starts, total, placed = [0] * len(widths), 0, list[int]()
    for buffer, uses in used.items():
        size, start = -(-widths[buffer] // ALIGNED) * ALIGNED, 0
        for other in sorted(placed, key=starts.__getitem__):
            apart = used[other][-1] < uses[0] or uses[-1] < used[other][0]
            if not apart and start < starts[other] + widths[other] and starts[other] < start + size:
                start = -(-(starts[other] + widths[other]) // ALIGNED) * ALIGNED
        starts[buffer], total = start, max(total, start + size)
        placed.append(buffer)
    return starts, total


class NativeOperations(TracedForms):
    """The operations of a layer as C structs, for tensors of one dtype.

    max_tokens: the most tokens of a call.
    """

    device = torch.device("cpu")
    max_tokens: int

    def compile(self, operations: list[Operation], widths: list[int]) -> None:
        """Make the structs. widths: of the buffers. Raises UntraceableError for an operation that has no kernel."""
        self._calls: list[NativeCall] = []  # keep the structs alive that the operations point to
        self._tensors: list[Tensor] = []  # the operations point to their memory
        self._widths, self._moved = list(widths), dict[int, Span]()
        compiled = [self._compile(operation) for operation in self._joined(operations)]
        self._ops = (LayerOp * len(compiled))(*compiled)
        starts, width = buffer_starts(compiled, self._widths)
        self._starts = (ctypes.c_int64 * len(starts))(*starts)
        self._fixed = ctypes.addressof(self._ops), ctypes.addressof(self._starts), len(compiled), width
        self._pointers = [tensor.data_ptr() for tensor in self._tensors]

    def has_memory(self) -> bool:
        """Return whether the tensors that the operations point to are where they were."""
        return list(map(Tensor.data_ptr, self._tensors)) == self._pointers

    def _joined(self, operations: list[Operation]) -> Iterator[Operation]:
        """Iterate over the operations, where linear layers on one input are one, at the place of the first of them."""
        done: list[Operation] = []
        # The kernel of a sum reads whole rows, which the results of a joint product are not.
        summed = [span for operation in operations if operation.kind == "add" for span in operation.inputs]
        for operation in operations:
            if operation in done:
                continue
            # Operations with other values end in other ways: one with an activation is computed alone.
            group = [
                o for o in operations
                if o.kind == "linear" and o.inputs == operation.inputs and not (o.values or operation.values)
                and o.outputs[0] not in summed
            ]  # fmt: skip
            if operation in group and len(group) > 1 and make_call(_layers(group), None, 1) is not None:
                done += group
                yield self._join(group)
            else:
                yield operation

    def _join(self, group: list[Operation]) -> Operation:
        widths = [operation.outputs[0].stride for operation in group]
        joint, column = Span(len(self._widths), 0, sum(widths)), 0
        self._widths.append(joint.stride)
        for operation, width in zip(group, widths, strict=True):
            buffer = operation.outputs[0].buffer
            self._moved[buffer], self._widths[buffer] = Span(joint.buffer, column, joint.stride), 0
            column += width
        return Operation("linear", group[0].inputs, [joint], _layers(group))

    def _place(self, span: Span) -> Columns:
        moved = self._moved.get(span.buffer)
        if moved is None:
            return Columns(span.buffer, span.offset, span.stride, span.head)
        return Columns(moved.buffer, moved.offset + span.offset, moved.stride, span.head)

    def _compile(self, operation: Operation) -> LayerOp:
        fields = self._fields(operation)
        places = (
            zip(("x", "y", "z"), operation.inputs, strict=False),
            zip(("out", "out2"), operation.outputs, strict=False),
        )
        fields |= {name: self._place(span) for pairs in places for name, span in pairs}
        if "kind" not in fields:
            fields["kind"] = KINDS[operation.kind]
        return LayerOp(**fields)

    def _fields(self, operation: Operation) -> dict[str, Any]:
        """Return the fields of an operation besides its places."""
        match operation.kind:
            case "linear" | "gated":
                return self._linear(operation)
            case "norm":
                return self._norm(operation)
            case "write":
                values = operation.values
                return {"kv_heads": values["heads"], "dim": values["dim"], "value_dim": values["value_dim"]}
            case "add":
                return {"dim": operation.values["dim"], "scale": operation.values["factor"]}
            case "layer_norm":
                return self._layer_norm(operation)
            case "rope":
                return self._rope(operation)
        raise UntraceableError(f"{operation.kind} has no native call")

    def _layer_norm(self, operation: Operation) -> dict[str, Any]:
        (norm,) = operation.modules
        fields: dict[str, Any] = {"dim": operation.values["dim"], "eps": norm.eps}
        for name in ("weight", "bias"):
            tensor = norm._parameters.get(name)
            self.reads.append(Read(norm._parameters, name, tensor))
            if name not in norm._parameters:
                raise UntraceableError("a norm computes its weight or bias")
            if tensor is None:
                continue
            if (
                not is_plain_tensor(tensor)
                or not tensor.is_cpu
                or tensor.dtype not in FLOATS
                or not tensor.is_contiguous()
            ):
                raise UntraceableError("a norm has no native call")
            self._tensors.append(tensor)
            fields |= {name: tensor.data_ptr(), f"{name}_dtype": DTYPES[tensor.dtype]}
        return fields

    def _linear(self, operation: Operation) -> dict[str, Any]:
        rows = min(self._rows(layer) for layer in operation.modules)
        values = operation.values
        call = make_call(operation.modules, values.get("epilogue"), rows, activation=values.get("activation"))
        if call is None:
            raise UntraceableError("a linear layer has no native call")
        if isinstance(call, FloatLinear) and call.weights[0].dtype is not self.dtype:
            raise UntraceableError("a linear layer has another dtype than its input")
        self._calls.append(call)
        self.max_tokens = min(self.max_tokens, rows)
        kind = "float_linear" if isinstance(call, FloatLinear) else "integer_linear"
        return {"kind": KINDS[kind], "weight": call.address(), "tile_rows": call.tile_rows}

    def _norm(self, operation: Operation) -> dict[str, Any]:
        form, weight = self.norm_form(operation), operation.modules[0]._parameters["weight"]
        assert weight is not None
        self._tensors.append(weight)
        return {
            "weight": weight.data_ptr(), "weight_dtype": DTYPES[weight.dtype], "heads": operation.values["heads"],
            "dim": operation.values["dim"], "eps": form.eps, "offset": form.offset, "round_first": form.round_first,
        }  # fmt: skip

    def _rope(self, operation: Operation) -> dict[str, Any]:
        form, values = self.rotary_form(operation), operation.values
        assert self.table_dtype is not None
        return {
            "heads": values["heads"], "kv_heads": values["kv_heads"], "dim": values["dim"],
            "interleaved": form.interleaved,
            "round_each": rounds_each(self.dtype, self.table_dtype, round_each=form.round_each),
        }  # fmt: skip

    def _rows(self, layer: nn.Module) -> int:
        """Return the most rows of a native call, and note what the call depends on."""
        own, parameters = vars(layer), layer._parameters
        rows = UNLIMITED
        self.reads.append(Read(parameters, "bias", parameters.get("bias")))
        if "bias" not in parameters or (isinstance(layer, NativeLinear) and parameters.get("weight") is None):
            self.reads.append(Read(parameters, "weight", parameters.get("weight")))
            raise UntraceableError("a linear layer computes its weight or bias")  # by prune or a parametrization
        if type(layer) is QuantLinear:
            self.reads += [Read(own, "_packed", own["_packed"]), Read(own, "choice", layer.choice)]
            if layer.choice is None or layer.choice.spec.dtype is not self.dtype:
                raise UntraceableError("a linear layer has another dtype than its input")
        elif isinstance(layer, NativeLinear):
            self.reads.append(Read(parameters, "weight", parameters["weight"]))
            rows = own[FUSED].float_rows
        else:
            raise UntraceableError("a linear layer has no native call")
        self._tensors += [tensor for tensor in parameters.values() if tensor is not None]
        return rows


class LayerProgramme(TracedLayer, NativeOperations):
    """A traced layer as one native call on the CPU.

    It holds addresses, and the values that the trace read: `is_current` says whether both are still the layer's.
    Raises UntraceableError for an operation that has no kernel.
    """

    def __init__(self, trace: Trace, table_dtype: torch.dtype | None, attention: Attention) -> None:
        super().__init__(trace, table_dtype, attention, torch.device("cpu"))
        operations = folded(trace.operations)
        # The kernels round a LayerNorm and an activation in other ways than torch does, which is called with more
        # tokens: where it need not be called, the bits of a token do not depend on how many there are.
        rounds = any(each.kind == "layer_norm" or "activation" in each.values for each in operations)
        self.max_tokens = UNLIMITED if rounds else MOST_TOKENS
        self.compile(operations, trace.widths)
        self.freeze_reads()

    # -- while it is made ------------------------------------------------------------------------------

    def _fields(self, operation: Operation) -> dict[str, Any]:
        values = operation.values
        match operation.kind:
            case "join":
                return {name: values[name] for name in ("heads", "dim", "value_dim")}
            case "attend":
                fields = {name: values[name] for name in ("heads", "kv_heads", "dim", "value_dim")}
                return fields | {name: value or 0 for name, value in self.attention._asdict().items()}
        return super()._fields(operation)

    # -- while it is used ------------------------------------------------------------------------------

    def is_current(self) -> bool:
        return super().is_current() and self.has_memory()

    def __call__(self, x: Tensor, fields: CallFields, pages: KV) -> Tensor:
        """x: [B, Q, hidden], contiguous -> [B, Q, hidden]. pages: those of the layer, to which K and V are written."""
        out, dtype = torch.empty_like(x), DTYPES[self.dtype]
        run_layer(
            *self._fixed, x.data_ptr(), out.data_ptr(), *fields.tables,
            *[0 if tensor is None else tensor.data_ptr() for tensor in pages], *fields.step, *NO_BIAS,
            dtype, 0 if self.table_dtype is None else DTYPES[self.table_dtype], DTYPES[pages.k.dtype],
            dtype if pages.k_scales is None else DTYPES[pages.k_scales.dtype], fields.threads,
        )  # fmt: skip
        return out


def _layers(operations: Iterable[Operation]) -> tuple[nn.Module, ...]:
    return tuple(module for operation in operations for module in operation.modules)
