"""A traced decoder layer as one native call on the CPU: its operations as C structs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..cache.kinds.states import StateStep
from ..cache.step import GroupStep
from ..kernels.cpu.attention import NO_BIAS
from ..kernels.cpu.layer_call import KINDS, NO_SOURCE, NO_STATES, Columns, LayerOp, run_layer
from ..kernels.cpu.library import DTYPES, page_dtype, threads
from ..kernels.cpu.low_rank import Adapters, PartTable
from ..kernels.layouts import KV
from ..linear.adapters import PassAdapters
from ..recognition.of_positions import OfPositions
from ..recognition.operation import OUTPUT, Operation, Span
from ..recognition.symbols import Computed
from ..recognition.trace import Trace
from .layer_tail import LayerTail, split
from .native_operation import NativeParts
from .operations import NATIVE
from .projections import UNLIMITED, make_call
from .state_operations import STATE_OPERATIONS
from .sum_operations import SUM_OPERATIONS
from .traced_layer import Attention, TracedLayer

# The most tokens of a call: with more, the time between the kernels is negligible, and the call's memory
# would be large.
MOST_TOKENS = 256
NO_OPERATIONS: list[Operation] = []
NO_STEP = (0,) * 9  # slots to num_written of a LayerCall
GIVEN = -(2**63)  # where a buffer begins that is no memory of the call, see kernels.h
ALIGNED = 32  # numbers; as many of any dtype are whole cache lines


class CallFields(NamedTuple):
    """Fields of the struct of a native call that are the same for layers of one kind in one pass.

    held: tensors whose addresses are among them.
    """

    tables: tuple[int, ...]
    step: tuple[int, ...]
    threads: int
    held: tuple[Tensor, ...]

    @staticmethod
    def of(x: Tensor, tables: tuple[Tensor, Tensor] | None, step: GroupStep | None, block_size: int) -> CallFields:
        """x: [B, Q, hidden], contiguous; tables: cos and sin, [B or 1, Q, head_dim]. step: of the pages of keys and
        values; None if the layer keeps none.
        """
        batch, tokens = x.shape[0], x.shape[0] * x.shape[1]
        places = (0, 0, tokens, batch, 0, 0)
        if tables is not None:
            cos, sin = tables
            if cos.stride(-1) != 1 or sin.stride() != cos.stride():
                cos, sin = tables = cos.contiguous(), sin.contiguous()
            strides = cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)
            places = (cos.data_ptr(), sin.data_ptr(), tokens, batch, *strides)
        if step is None:
            return CallFields(places, NO_STEP, threads(), tables or ())
        slots, written, ragged = step.slots, step.written, step.ragged
        table = ragged.block_table
        assert table is not None
        held = (table, ragged.cu_q, ragged.kv_len)
        pages = (
            slots.data_ptr(), 0 if written is None else written.data_ptr(), *(tensor.data_ptr() for tensor in held),
            table.stride(0), len(table), block_size, len(slots),
        )  # fmt: skip
        return CallFields(
            places, pages, threads(), (*(tables or ()), slots, *held, slots if written is None else written)
        )


class SourceFields(NamedTuple):
    """Fields of the struct of a native call for the pages of an encoder's output: what attention reads of them."""

    step: tuple[int, ...]
    held: tuple[Tensor, ...]

    @staticmethod
    def of(step: GroupStep, block_size: int) -> SourceFields:
        ragged = step.ragged
        table = ragged.block_table
        assert table is not None
        held = (table, ragged.cu_q, ragged.kv_len)
        places = (*(tensor.data_ptr() for tensor in held), table.stride(0), len(ragged.kv_len), block_size)
        return SourceFields(places, held)


class StateFields(NamedTuple):
    """Fields of the struct of a native call for states of fixed size, behind the addresses of their pages."""

    step: tuple[int, ...]
    held: tuple[Tensor, ...]

    @staticmethod
    def of(states: StateStep) -> StateFields:
        held = states.slots, states.starts, states.before, states.given
        return StateFields((*(tensor.data_ptr() for tensor in held), len(states.before)), held)


class LayerPages(NamedTuple):
    """The pages of a layer. own: those to which K and V are written; None if it keeps none. source: those that hold
    keys of an encoder's output, and what attention reads of them. states: the fields of those of its states.
    """

    own: KV | None
    source: tuple[KV, SourceFields] | None = None
    states: tuple[int, ...] = NO_STATES


def buffer_starts(
    operations: Sequence[LayerOp], widths: Sequence[int], kept: Sequence[int] = (), given: int | None = None
) -> tuple[list[int], int]:
    """Return where the buffers of a call begin, in numbers of a token, and how many numbers there are in all.

    Buffers share memory if the last operation that uses the one comes before the first that uses the other. So a call
    needs less of the caches. The layer's input and output are not among them and begin at 0. kept: those that are read
    behind the call, one after the other where its output is; see LayerCall. given: the one that a layer is given
    besides its input; None without.
    """
    used: dict[int, list[int]] = {}
    for index, operation in enumerate(operations):
        for place in (operation.x, operation.y, operation.z, operation.out, operation.out2):
            if place.stride and place.buffer > OUTPUT and place.buffer not in (*kept, given):
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
    for place, buffer in enumerate(kept):
        starts[buffer] = ~(place * widths[buffer])
    if given is not None:
        starts[given] = GIVEN
    return starts, total


class NativeOperations(NativeParts):
    """The operations of a layer as C structs. Raises UntraceableError for an operation that has no kernel."""

    tail: LayerTail | None = None
    of_layer: Span | None = None

    def compile(self, widths: Sequence[int], behind: list[Operation] = NO_OPERATIONS) -> None:
        """Make the structs. widths: of the buffers. behind: the operations that follow the native call."""
        self.calls, self.norms, self.tensors = [], [], []
        self.tail = LayerTail(behind, self) if behind else None
        self._kept = [] if self.tail is None else self.tail.kept
        self._widths, self._moved = list(widths), dict[int, Span]()
        joined = list(self._joined(self.operations))
        compiled = [self._compile(operation) for operation in joined]
        self.linears = [module for each in joined if each.kind in ("linear", "gated") for module in each.modules]
        self._ops = (LayerOp * len(compiled))(*compiled)
        starts, width = buffer_starts(
            compiled, self._widths, self._kept, None if self.of_layer is None else self.of_layer.buffer
        )
        self._starts = (ctypes.c_int64 * len(starts))(*starts)
        self._fixed = ctypes.addressof(self._ops), ctypes.addressof(self._starts), len(compiled), width
        self._pointers = [tensor.data_ptr() for tensor in self.tensors]
        self._strides = [tensor.stride() for tensor in self.tensors]
        self.freeze_reads()

    def is_current(self) -> bool:
        """Return whether nothing has changed that was read, and the tensors that the structs point to are where they
        were, in the same order.
        """
        return super().is_current() and self.is_in_place()

    def is_in_place(self) -> bool:
        """Return whether the tensors that the structs point to are where they were, with their strides."""
        strides = list(map(Tensor.stride, self.tensors))  # others by .data = data.t()
        return strides == self._strides and list(map(Tensor.data_ptr, self.tensors)) == self._pointers

    def _joined(self, operations: list[Operation]) -> Iterator[Operation]:
        """Iterate over the operations, where linear layers on one input are one, at the place of the first of them."""
        done: list[Operation] = []
        # The kernel of a sum reads whole rows, which the results of a joint product are not.
        summed = [span for each in operations if each.kind in SUM_OPERATIONS for span in each.inputs]
        for operation in operations:
            if operation in done:
                continue
            # Operations with other values end in other ways: one with an activation is computed alone.
            group = [
                o for o in operations
                if o.kind == "linear" and o.inputs == operation.inputs and not (o.values or operation.values)
                and o.outputs[0] not in summed and o.outputs[0].buffer not in self._kept
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
        fields: dict[str, Any] = {"kind": KINDS.get(operation.kind)}
        fields |= {
            name: self._place(span) for name, span in zip(("x", "y", "z", "out2"), operation.inputs, strict=False)
        }
        fields |= {name: self._place(span) for name, span in zip(("out", "out2"), operation.outputs, strict=False)}
        return LayerOp(**fields | NATIVE[operation.kind].fields(operation, self))


class LayerProgramme(NativeOperations, TracedLayer):
    """A traced layer as one native call on the CPU.

    It holds addresses, and the values that the trace read: `is_current` says whether both are still the layer's.
    attends: the module that attends to the tokens of a sequence; None for a layer with a state alone. biased_heads,
    own_bias: see EncoderProgramme. tail: the operations from a module that is called on; None if all are one native
    call. by_position: what the code makes the factors of its queries of; None if they have none. is_source_biased:
    whether it adds a bias to the scores of an encoder's output, which can be zeros alone. of_layer: the place of what
    it is given besides its hidden states, see Record; None if it gets no such.
    """

    over_rows = False

    def __init__(
        self,
        trace: Trace,
        table_dtype: torch.dtype | None,
        attention: Attention,
        source_attention: Attention | None = None,
    ) -> None:
        super().__init__(trace, table_dtype, attention, torch.device("cpu"))
        self.of_layer = trace.of_layer
        self.operations, behind = split(trace.operations, trace.widths)
        self.source_attention = source_attention
        self.attends: nn.Module | None = None
        self.biased_heads, self.own_bias = 0, cast("Computed | None", None)
        for each in (each for each in trace.operations if each.kind == "attend"):
            (self.attends,) = each.modules
            self.biased_heads, self.own_bias = each.values["heads"] * each.values["biased"], each.values["own_bias"]
        self.by_position: OfPositions | None = next(
            (o.values["numbers"] for o in trace.operations if o.kind == "by_position"), None
        )
        self.is_source_biased = any(o.kind == "attend_source" and o.values["biased"] for o in trace.operations)
        # The kernels round a LayerNorm and an activation in other ways than torch does, which is called with more
        # tokens: where it need not be called, the bits of a token do not depend on how many there are.
        rounds = any(
            each.kind == "layer_norm" or ("activation" in each.values and each.kind not in STATE_OPERATIONS)
            for each in trace.operations
        )
        self.max_tokens = UNLIMITED if rounds else MOST_TOKENS
        self.compile(trace.widths, behind)
        products = all(operation.kind != "head_products" for operation in self.operations)
        self.is_one_call = products and self.tail is None and self.state_sizes is None
        self._table: tuple[list[int], PartTable] | None = None  # of the adapters with these numbers

    def __call__(
        self, x: Tensor, fields: CallFields, pages: LayerPages,
        *, bias: tuple[int, int, int, int] = NO_BIAS, adapters: PassAdapters | None = None,
        given: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """x: [B, Q, hidden], contiguous -> [B, Q, hidden].

        bias: the fields of what is added to the scores of the pages. adapters: of some of the rows, where it takes
        them. given: [B, Q, size of `of_layer`], contiguous. None, after K and V or states were written, if a module
        does not return what the trace expects: the layer's code writes the same again.
        """
        shape = (len(self._kept), *x.shape) if self._kept else x.shape
        out = x.new_empty(shape) if x.dtype is self.out_dtype else x.new_empty(shape, dtype=self.out_dtype)
        added = None if adapters is None else self._added(adapters)
        places = (0 if given is None else given.data_ptr(), x.data_ptr(), out.data_ptr())
        run_layer(*self.fields(places, fields, pages, bias=bias, added=added))
        return out if self.tail is None else self.tail(x, out)

    @property
    def called(self) -> list[nn.Module]:
        """The modules that are called as they are."""
        return [] if self.tail is None else self.tail.called

    def fields(
        self, places: tuple[int, int, int], fields: CallFields, pages: LayerPages,
        *, bias: tuple[int, int, int, int] = NO_BIAS, added: Adapters | None = None,
    ) -> tuple[int, ...]:  # fmt: skip
        """Return the fields of the struct of a call, see `__call__`.

        places: the addresses of what it is given besides x (0 for nothing), x and out. added: what adapters add.
        """
        dtype = DTYPES[self.dtype]
        own, source, dtypes = pages.own, pages.source, (dtype, dtype)
        if own is not None:
            scales = dtype if own.k_scales is None else DTYPES[own.k_scales.dtype]
            dtypes = page_dtype(own.k, own.v), scales
        read = NO_SOURCE if source is None else (*_addresses(source[0]), *source[1].step)
        return (
            *self._fixed, *places, *fields.tables,
            *_addresses(own), *fields.step, *bias, 0, 0, 0, *read, *pages.states,
            0 if added is None else ctypes.addressof(added),
            dtype, 0 if self.table_dtype is None else DTYPES[self.table_dtype], *dtypes, fields.threads,
        )  # fmt: skip

    def _added(self, given: PassAdapters) -> Adapters:
        """Return what adapters add to the linear layers, and note that they do."""
        if self._table is None or self._table[0] != given.numbers:
            self._table = given.numbers, given.table(self.linears)
        table = self._table[1]
        given.num_added += table.num_parts
        return Adapters(*table.fields(given.groups))


def _addresses(pages: KV | None) -> tuple[int, int, int, int]:
    if pages is None:
        return 0, 0, 0, 0
    k, v, k_scales, v_scales = pages
    if k_scales is None or v_scales is None:
        return k.data_ptr(), v.data_ptr(), 0, 0
    return k.data_ptr(), v.data_ptr(), k_scales.data_ptr(), v_scales.data_ptr()


def _layers(operations: Iterable[Operation]) -> tuple[nn.Module, ...]:
    return tuple(module for operation in operations for module in operation.modules)
