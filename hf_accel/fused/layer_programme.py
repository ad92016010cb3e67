"""Traced decoder layers: the values that a layer depends on, and for the CPU its operations as C structs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cache.group import GroupStep, KVStorage
from ..kernels.cpu.attention import NO_BIAS
from ..kernels.cpu.decoder_layer import OPERATIONS, run_layer
from ..kernels.cpu.float_linear import FloatLinear
from ..kernels.cpu.library import DTYPES, Columns, LayerOp, threads
from ..kernels.cpu.row_kernels import rounds_each
from ..kernels.layouts import KV
from ..linear import QuantLinear
from ..recognition.operation import OUTPUT, Operation, Span, UntraceableError
from ..recognition.trace import Trace
from ..recognition.unchanged import GLOBAL_HOOKS, Read, Reads
from ..tensors import PLAIN
from ..undo.state import FUSED
from .modules import NativeNorm, NormForm, RotaryForm, form_of_rotation
from .projections import UNLIMITED, NativeCall, NativeLinear, make_call

# The most tokens of a call: with more, the time between the kernels is negligible, and the call's memory
# would be large.
MOST_TOKENS = 256
KINDS = {name: number for number, name in enumerate(OPERATIONS)}


class Attention(NamedTuple):
    """The attention of a layer's attend operation. window: in tokens, None for all."""

    scale: float
    softcap: float | None
    window: int | None


class TracedNorms:
    """The norms of a trace that was taken with tensors of one dtype, for calls on `device`.

    reads: the values that must not change.
    """

    dtype: torch.dtype
    device: torch.device
    reads: list[Read]

    def norm_form(self, operation: Operation) -> NormForm:
        """Raises UntraceableError for a norm that has no native call."""
        (module,) = operation.modules
        own, weight = vars(module), module._parameters["weight"]
        form: NormForm | None = None
        if isinstance(module, NativeNorm):
            example = torch.empty(1, operation.values["dim"], dtype=self.dtype, device=self.device)
            form = own[FUSED].form(module, example)
        if form is None or weight is None or not weight.is_contiguous():
            raise UntraceableError("a norm has no native call")
        if form.round_first and torch.promote_types(self.dtype, weight.dtype) is not self.dtype:
            raise UntraceableError("a norm changes the dtype")
        self.reads += [Read(own, name, own.get(name)) for name in ("eps", "variance_epsilon")]
        self.reads.append(Read(module._parameters, "weight", weight))
        return form


class TracedLayer(TracedNorms):
    """A layer whose trace was taken with tensors of one dtype, and tables of `table_dtype`, for calls on `device`.

    max_tokens: the most tokens of a call. reads: the values that must not change, those that the trace read among
    them.
    """

    max_tokens: int

    def __init__(self, trace: Trace, table_dtype: torch.dtype, attention: Attention, device: torch.device) -> None:
        assert trace.layer_idx is not None
        self.dtype, self.table_dtype, self.attention, self.device = trace.dtype, table_dtype, attention, device
        self.layer_idx, self.returns_tuple = trace.layer_idx, trace.returns_tuple
        self.reads = trace.reads
        self.width = trace.widths[OUTPUT]
        self._hooks = [*trace.hooks, *GLOBAL_HOOKS]
        kv = next(operation.values for operation in trace.operations if operation.kind == "write")
        # Empty K and V, with the shape and the dtype of those that are written.
        shapes = [(0, kv["heads"], kv[size]) for size in ("dim", "value_dim")]
        self.written = [torch.empty(shape, dtype=self.dtype, device=device) for shape in shapes]

    # -- while it is made ------------------------------------------------------------------------------

    def rotary_form(self, operation: Operation) -> RotaryForm:
        """Raises UntraceableError for a rotation that has no native call."""
        form = form_of_rotation(operation.values["function"], self.dtype, self.table_dtype, self.device.type)
        if form is None:
            raise UntraceableError("its rotation has no native call")
        return form

    @property
    def limits(self) -> tuple[object, ...]:
        """The sizes that `takes` and `fits` compare, besides dtypes and the device."""
        return self.width, self.max_tokens, self.attention.window, *(tensor.shape for tensor in self.written)

    def freeze_reads(self) -> None:
        """End the collection of `reads`; called when all that the layer depends on is in them."""
        self._frozen = Reads(self.reads)

    # -- while it is used ------------------------------------------------------------------------------

    def is_current(self) -> bool:
        return self._frozen.hold()

    def is_unobserved(self) -> bool:
        """Return whether no hook or replaced forward would notice that the modules are not called."""
        return not any(self._hooks)

    def takes(self, x: Tensor, cos: Tensor, sin: Tensor, *, tokens: int) -> bool:
        """Return whether the tensors of a pass over so many tokens have the shapes that the trace is for."""
        if x.ndim != 3 or cos.ndim != 3:
            return False
        batch, row, size = x.shape
        table = (cos.shape[0], row, self.written[0].shape[2])
        return (
            size == self.width
            and batch * row == tokens
            and 0 < tokens <= self.max_tokens
            and cos.shape[0] in (1, batch)
            and x.is_contiguous()
            and cos.dtype is sin.dtype
            and cos.shape == sin.shape == table
            and type(cos) in PLAIN
            and type(sin) in PLAIN
            and cos.device == sin.device == x.device == self.device
        )

    def fits(self, storage: KVStorage) -> bool:
        """Return whether the pages hold K and V as the layer writes them, and attention reads them."""
        pages, (keys, values) = storage.pages, self.written
        dims = (pages.k.shape[1], pages.key_dim, pages.value_dim)
        same = storage.dtype is self.dtype and pages.k.device == self.device
        return same and dims == (*keys.shape[1:], values.shape[2])


class CallFields(NamedTuple):
    """Fields of the struct of a native call that are the same for layers of one kind in one pass.

    held: tensors whose addresses are among them.
    """

    tables: tuple[int, ...]
    step: tuple[int, ...]
    threads: int
    held: tuple[Tensor, ...]

    @staticmethod
    def of(x: Tensor, tables: tuple[Tensor, Tensor], step: GroupStep, block_size: int) -> CallFields:
        """x: [B, Q, hidden], contiguous; tables: cos and sin, [B or 1, Q, head_dim]."""
        cos, sin = tables
        if cos.stride(-1) != 1 or sin.stride() != cos.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        slots, ragged = step.slots, step.ragged
        table = ragged.block_table
        assert table is not None
        held = (cos, sin, slots, table, ragged.cu_q, ragged.kv_len)
        batch, tokens = x.shape[0], x.shape[0] * x.shape[1]
        places = (cos.data_ptr(), sin.data_ptr(), tokens, batch, cos.stride(0) if len(cos) > 1 else 0, cos.stride(1))
        pages = (*(tensor.data_ptr() for tensor in held[2:]), table.stride(0), len(table), block_size)
        return CallFields(places, pages, threads(), held)


class NativeOperations(TracedNorms):
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
        starts = [0, 0]
        for width in self._widths[OUTPUT + 1 :]:
            starts.append(starts[-1] + width)
        self._starts = (ctypes.c_int64 * len(self._widths))(0, *starts[:-1])
        self._fixed = ctypes.addressof(self._ops), ctypes.addressof(self._starts), len(compiled), starts[-1]
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
            group = [
                o for o in operations
                if o.kind == "linear" and o.inputs == operation.inputs and o.outputs[0] not in summed
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
            return Columns(span.buffer, span.offset, span.stride)
        return Columns(moved.buffer, moved.offset + span.offset, moved.stride)

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
        raise UntraceableError(f"{operation.kind} has no native call")

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

    def __init__(self, trace: Trace, table_dtype: torch.dtype, attention: Attention) -> None:
        super().__init__(trace, table_dtype, attention, torch.device("cpu"))
        self.max_tokens = MOST_TOKENS
        self.compile(trace.operations, trace.widths)
        self.freeze_reads()

    # -- while it is made ------------------------------------------------------------------------------

    def _fields(self, operation: Operation) -> dict[str, Any]:
        values = operation.values
        match operation.kind:
            case "rope":
                return self._rope(operation)
            case "attend":
                fields = {name: values[name] for name in ("heads", "kv_heads", "dim", "value_dim")}
                return fields | {name: value or 0 for name, value in self.attention._asdict().items()}
        return super()._fields(operation)

    def _rope(self, operation: Operation) -> dict[str, Any]:
        form, values = self.rotary_form(operation), operation.values
        return {
            "heads": values["heads"], "kv_heads": values["kv_heads"], "dim": values["dim"],
            "interleaved": form.interleaved,
            "round_each": rounds_each(self.dtype, self.table_dtype, round_each=form.round_each),
        }  # fmt: skip

    # -- while it is used ------------------------------------------------------------------------------

    def is_current(self) -> bool:
        return super().is_current() and self.has_memory()

    def __call__(self, x: Tensor, fields: CallFields, pages: KV) -> Tensor:
        """x: [B, Q, hidden], contiguous -> [B, Q, hidden]. pages: those of the layer, to which K and V are written."""
        out, dtype = torch.empty_like(x), DTYPES[self.dtype]
        run_layer(
            *self._fixed, x.data_ptr(), out.data_ptr(), *fields.tables,
            *[0 if tensor is None else tensor.data_ptr() for tensor in pages], *fields.step, *NO_BIAS,
            dtype, DTYPES[self.table_dtype], DTYPES[pages.k.dtype],
            dtype if pages.k_scales is None else DTYPES[pages.k_scales.dtype], fields.threads,
        )  # fmt: skip
        return out


def _layers(operations: Iterable[Operation]) -> tuple[nn.Module, ...]:
    return tuple(module for operation in operations for module in operation.modules)
