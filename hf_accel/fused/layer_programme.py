"""A traced decoder layer as one native call on the CPU: its operations as C structs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..cache.kinds.states import StateStep
from ..cache.step import GroupStep
from ..hardware import UNLIMITED
from ..kernels.cpu.layer_call import KINDS, NO_PARTS, Columns, LayerOp, Parts, pack_parts, run_layer
from ..kernels.cpu.library import DTYPES, page_dtype, threads
from ..kernels.cpu.low_rank import Adapters, PartTable
from ..kernels.layouts import KV
from ..linear.adapters import PassAdapters
from ..recognition.of_positions import OfPositions
from ..recognition.operation import OUTPUT, Operation, Span, UntraceableError
from ..recognition.symbols import Computed
from ..recognition.trace import Trace
from .half_buffers import half_buffers
from .layer_tail import LayerTail, split
from .native_operation import NativeParts
from .operations import NATIVE
from .projections import make_call
from .state_operations import STATE_OPERATIONS
from .sum_operations import SUM_OPERATIONS
from .traced_layer import Attention, TracedLayer

# The most memory of a call, which its thread keeps. On an EPYC with AVX2, prompts of 512 tokens by one call of each
# layer took 0.87 to 0.97 of the time of module by module, whose results are in new memory each.
MOST_BYTES = 2**26
MOST_TOKENS = 256  # that a call may have whatever its memory
NO_OPERATIONS: list[Operation] = []
GIVEN = -(2**63)  # where a buffer begins that is no memory of the call, see kernels.h
ALIGNED = 32  # numbers; as many of any dtype are whole cache lines


# -- the inputs of a call in a pass: addresses of tensors, which whoever makes the call keeps until it is done ---


def of_rows(x: Tensor, tables: tuple[Tensor, Tensor] | None = None) -> Parts:
    """x: [B, Q, hidden]; tables: cos and sin, [B or 1, Q, head_dim] with equal strides, the last one 1."""
    places, strides = (0, 0), (0, 0)
    if tables is not None:
        cos, sin = tables
        places, strides = (cos.data_ptr(), sin.data_ptr()), (cos.stride(0) if len(cos) > 1 else 0, cos.stride(1))
    return pack_parts(tables=(*places, x.shape[0] * x.shape[1], x.shape[0], *strides), threads=(threads(),))


def of_step(step: GroupStep, block_size: int) -> Parts:
    """Return what a pass writes to pages of keys and values, and reads of them."""
    slots, written, read = step.slots, step.written, _read(step)
    places = slots.data_ptr(), 0 if written is None else written.data_ptr(), *map(Tensor.data_ptr, read)
    return pack_parts(step=(*places, read[0].stride(0), len(read[0]), block_size, len(slots)))


def of_pages(pages: KV) -> Parts:
    """Return pages of keys and values to which a layer writes."""
    scales = pages.k if pages.k_scales is None else pages.k_scales
    return pack_parts(pages=_addresses(pages), page_dtypes=(page_dtype(pages.k, pages.v), DTYPES[scales.dtype]))


def of_source(pages: KV, step: GroupStep, block_size: int) -> Parts:
    """Return pages that hold keys of an encoder's output, and what a pass reads of them."""
    read = _read(step)
    sizes = read[0].stride(0), len(read[2]), block_size
    return pack_parts(source=(*_addresses(pages), *map(Tensor.data_ptr, read), *sizes))


def of_states(pages: KV, step: StateStep) -> Parts:
    """Return pages of states of fixed size, and what a pass reads and writes of them."""
    held = pages.k, pages.v, step.slots, step.starts, step.before, step.given
    return pack_parts(states=(*map(Tensor.data_ptr, held), len(step.before)))


def _read(step: GroupStep) -> tuple[Tensor, Tensor, Tensor]:
    ragged = step.ragged
    assert ragged.block_table is not None
    return ragged.block_table, ragged.cu_q, ragged.kv_len


def _addresses(pages: KV) -> tuple[int, int, int, int]:
    k, v, k_scales, v_scales = pages
    if k_scales is None or v_scales is None:
        return k.data_ptr(), v.data_ptr(), 0, 0
    return k.data_ptr(), v.data_ptr(), k_scales.data_ptr(), v_scales.data_ptr()


# -- the operations -------------------------------------------------------------------------------------


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
    """The operations of a layer as C structs. Raises UntraceableError for an operation that has no kernel.

    takes_halves: whether results inside the layer may be bfloat16, see half_buffers. token_bytes: the memory that a
    call needs for each token.
    """

    takes_halves = False
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
        for buffer in half_buffers(compiled, self.dtype) if self.takes_halves else ():
            self._widths[buffer] = -(-self._widths[buffer] // 2)  # in numbers of the call
        self.linears = [module for each in joined if each.kind in ("linear", "gated") for module in each.modules]
        self._ops = (LayerOp * len(compiled))(*compiled)
        starts, width = buffer_starts(
            compiled, self._widths, self._kept, None if self.of_layer is None else self.of_layer.buffer
        )
        self._starts = (ctypes.c_int64 * len(starts))(*starts)
        self.token_bytes = width * self.dtype.itemsize
        self.parts: Parts = NO_PARTS | pack_parts(
            operations=(ctypes.addressof(self._ops), ctypes.addressof(self._starts), len(compiled), width),
            dtypes=(DTYPES[self.dtype], 0 if self.table_dtype is None else DTYPES[self.table_dtype]),
        )
        self._pointers = [tensor.data_ptr() for tensor in self.tensors]
        self._strides = [tensor.stride() for tensor in self.tensors]
        self.freeze_reads()

    def run(self, inputs: Parts) -> None:
        """Run the operations on these inputs, "rows" among them."""
        run_layer(self.parts | inputs)

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
        self.max_tokens = UNLIMITED
        self.compile(trace.widths, behind)
        if not rounds:
            self.max_tokens = min(self.max_tokens, max(MOST_TOKENS, MOST_BYTES // max(1, self.token_bytes)))
        products = all(operation.kind != "head_products" for operation in self.operations)
        self.is_one_call = products and self.tail is None and self.state_sizes is None
        if trace.source is not None and not (self.is_one_call and self.of_layer is None):
            raise UntraceableError("it attends to an encoder's output, and is not one native call")
        self._table: tuple[list[int], PartTable] | None = None  # of the adapters with these numbers

    def __call__(self, x: Tensor, inputs: Parts, *, adapters: PassAdapters | None = None) -> Tensor | None:
        """x: [B, Q, hidden], contiguous -> [B, Q, hidden].

        adapters: of some of the rows, where it takes them. None, after K and V or states were written, if a module
        does not return what the trace expects: the layer's code writes the same again.
        """
        shape = (len(self._kept), *x.shape) if self._kept else x.shape
        out = x.new_empty(shape) if x.dtype is self.out_dtype else x.new_empty(shape, dtype=self.out_dtype)
        inputs |= pack_parts(rows=(x.data_ptr(), out.data_ptr()))
        added = None if adapters is None else self._added(adapters)
        if added is not None:
            inputs |= pack_parts(adapters=(ctypes.addressof(added),))
        self.run(inputs)
        return out if self.tail is None else self.tail(x, out)

    @property
    def called(self) -> list[nn.Module]:
        """The modules that are called as they are."""
        return [] if self.tail is None else self.tail.called

    def _added(self, given: PassAdapters) -> Adapters:
        """Return what adapters add to the linear layers, and note that they do."""
        if self._table is None or self._table[0] != given.numbers:
            self._table = given.numbers, given.table(self.linears)
        table = self._table[1]
        given.num_added += table.num_parts
        return Adapters(*table.fields(given.groups))


def _layers(operations: Iterable[Operation]) -> tuple[nn.Module, ...]:
    return tuple(module for operation in operations for module in operation.modules)
