"""A traced layer as one native call over sequences that stand end to end, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hardware import UNLIMITED
from ..kernels.cpu.attention import EVERY_KEY, bias_fields, middle
from ..kernels.cpu.layer_call import pack_parts
from ..kernels.cpu.library import DTYPES, dtypes_of_pages, threads
from ..recognition.call_form import BIAS, TABLES
from ..recognition.known_module import Said, TokenPlaces
from ..recognition.operation import OUTPUT, Operation, UntraceableError
from ..recognition.symbols import Computed
from ..recognition.trace import WEIGHTS, Trace
from .encoder_rows import (
    NOTHING,
    Bias,
    CallTensors,
    RowLayout,
    WrittenRows,
    layout_of,
    layout_of_columns,
    packed_layout,
    windowed_layout,
)
from .layer_programme import NativeOperations
from .modules import RotaryForm
from .native_operation import HeldRows
from .operations import NATIVE, refuse_over_rows
from .partial_rotation import rotation_over_rows
from .traced_layer import Attention


class Causal(NamedTuple):
    """Attention to the keys up to a query's own: the last `window` of them, or all.

    first_counts: whether models read the first place of a row, which then must hold a token.
    """

    window: int | None = None
    first_counts: bool = False


class EncoderProgramme(NativeOperations):
    """A traced layer on the CPU, over the rows of a call.

    It holds addresses, and the values that the trace read: `is_current` says whether both are still the layer's.
    Raises UntraceableError for an operation that has no kernel.

    table_dtype: of cos and sin. window: a query sees the keys at a distance of less than this, None for all. causal:
    only those up to its own. tables: the size of the cos and sin of a token, None if the layer reads none.
    returns_weights: whether its code returns those of its attention, which are not computed here.
    biased_heads: the heads of the bias that is added to scores, 0 if there is none. own_bias: computes it, None if the
    layer is given one.
    """

    over_rows = True

    def __init__(
        self, trace: Trace, scale: float, table_dtype: torch.dtype | None = None, *, causal: Causal | None = None,
    ) -> None:  # fmt: skip
        refuse_over_rows(trace.operations)
        if any(each is not None for each in (trace.of_layer, trace.leaves, trace.taken)):
            raise UntraceableError("it is given more than its hidden states")
        attends = next(operation.values for operation in trace.operations if operation.kind == "attend")
        self.layer_idx, self.rotates_last = trace.layer_idx, False
        self.causal, self.first_counts = causal is not None, causal is None or causal.first_counts
        self.window = attended_window(trace.operations) if causal is None else causal.window
        ahead = 0 if self.causal else EVERY_KEY if self.window is None else self.window - 1
        attention = Attention(scale, attends["options"].get("softcap"), self.window, ahead)
        rotations = [operation.values for operation in trace.operations if operation.kind == "rope"]
        self._reads_tables = all("read" not in values for values in rotations)
        table_dtype = next((values["table_dtype"] for values in rotations if "read" in values), table_dtype)
        super().__init__(trace, table_dtype, attention, torch.device("cpu"))
        dims = {values["dim"] for values in rotations}
        if len(dims) > 1:
            raise UntraceableError("it rotates heads of different sizes")
        if self.rotates_last and len({values["function"] for values in rotations}) > 1:
            raise UntraceableError("it rotates in two ways")
        self.tables: int | None = min(dims, default=None)
        self.biased_heads: int = attends["heads"] if attends["biased"] else 0
        self.own_bias: Computed | None = attends["own_bias"]
        self.positions = next((each for each in trace.operations if each.kind == "position_scores"), None)
        self._reading = [operation for operation in trace.operations if "read" in operation.values]
        # Programmes for which these are equal read the same of a call.
        self.reading = self.tables, self._reads_tables, tuple(each.values["read"] for each in self._reading)
        self._adds_mask: bool = attends["adds_mask"]
        self._places: TokenPlaces | None = attends.get("places")
        self._merges_bias: bool = attends.get("merges_bias", False)
        self.returns_weights = WEIGHTS in (self.others or ())
        if BIAS in (self.others or ()) and not attends["biased"]:
            raise UntraceableError("it returns a bias that it does not add")
        self.max_tokens = UNLIMITED
        self._unread = unread_after(self.operations)
        # Layers of a decoder compute a token in other passes too, which shall find the same.
        self.takes_halves = not self.causal and self.write is None
        self.compile(trace.widths)

    # -- while it is used ------------------------------------------------------------------------------

    def layout_of(self, mask: Tensor | None, batch: int, tokens: int) -> RowLayout | None:
        """Return the layout of a batch with this mask; None if the layer attends in another way than the mask says."""
        if self._adds_mask and mask is not None and not mask.is_floating_point():
            return None  # true is 1 where it is added
        if self.causal and mask is not None:
            return None
        if self._places is not None and mask is not None:
            columns = self._places.of(mask, batch, tokens)
            found = None if columns is None else layout_of_columns(columns)
            far = self.window is not None and tokens > self.window  # where padding counts in distances
            return None if found is None or (far and not found.ends_with_padding()) else found
        if self.causal or self.window is None:
            return layout_of(mask, batch, tokens)
        return windowed_layout(mask, batch, tokens, self.window)

    def layout_of_starts(self, starts: Any, shape: tuple[int, int], *, in_rows: bool) -> RowLayout | None:
        """Return the layout of packed sequences; None if a token does not attend to all of its own sequence."""
        if self.causal or self.window is not None or self.positions is not None or self.write is not None:
            return None
        return packed_layout(starts, shape, in_rows=in_rows)

    def with_padding(self, layout: RowLayout) -> RowLayout | None:
        """Return the layout in which padding is computed too; None if stock computes something else there."""
        hides = self._places is not None and self._places.hides
        if self.causal or self.write is not None or self.window is not None or hides:
            return None
        return layout.with_padding()

    def to_write(self, layout: RowLayout) -> WrittenRows | None:
        """Return memory for the keys and the values of a batch; None if the layer writes none."""
        if self.write is None:
            return None
        values = self.write.values
        return layout.to_write(values["heads"], (values["dim"], values["value_dim"]), self.dtype)

    def tensors_of(self, layout: RowLayout, said: Said) -> CallTensors | None:
        """Return what a call gives besides its rows; None if it is of another form. said: gives its arguments."""
        tables = bias = None
        if self.tables is not None and self._reads_tables:
            tables = layout.tables(said(TABLES), of_last=self.rotates_last)
            if tables is None or tables[0].shape[1] != self.tables:
                return None
        if self.biased_heads:
            bias = self._bias(layout, said(BIAS))
            if bias is None:
                return None
        tensors: CallTensors | None = CallTensors(tables, bias)
        for operation in self._reading:
            if tensors is not None:
                tensors = operation.values["read"](operation, layout, said, tensors)
        return tensors

    def _bias(self, layout: RowLayout, given: Any) -> Bias | None:
        """Return the bias of a layer, which is given one or computes it; None for one of another form."""
        (batch, tokens), heads = layout.shape, self.biased_heads
        if self.own_bias is not None:  # in the layout of the kernel, for the layers behind that share it
            given = self.own_bias(tokens).contiguous()
            if self._merges_bias:
                given = given.expand(batch, *given.shape).flatten(0, 1)
        if not self._merges_bias:
            return layout.bias(given, heads)
        if type(given) is not Tensor or given.shape != (batch * heads, tokens, tokens):
            return None
        bias = layout.bias(given.reshape(batch, heads, tokens, tokens), heads)
        return None if bias is None else bias._replace(given=given)

    def rotary_form(self, operation: Operation) -> RotaryForm:
        values, found = operation.values, None
        if self.table_dtype is not None and not values["partial"]:
            found = rotation_over_rows(values["function"], self.dtype, self.table_dtype)
        if found is None or not found[1]:
            return super().rotary_form(operation)
        self.forms[id(operation)], self.rotates_last = found
        return found[0]

    def __call__(
        self, x: Tensor, layout: RowLayout, tensors: CallTensors = NOTHING, *, out: Tensor | None = None
    ) -> Tensor:
        """x: [N, width], contiguous, of the dtype of the trace: the tokens of the layout -> [N, width].

        tensors: cos and sin, [N, self.tables] of table_dtype, contiguous; the bias of the layout, for
        self.biased_heads; and what `to_write` made, to be filled. out: memory like x that may take the result.
        """
        if any(call.rows.stop - call.rows.start > self.max_tokens for call in layout.calls):
            return self._one_by_one(x, layout, tensors)
        tables, bias, written, positions = tensors
        dtype = DTYPES[self.dtype]
        inputs = pack_parts(threads=(threads(),), page_dtypes=(dtypes_of_pages(dtype, dtype), 0))
        table, block = None if bias is None else bias.table, 0
        if positions is not None:
            assert self.positions is not None
            most, size = max(len(call.starts) for call in layout.calls) - 1, layout.ragged.max_q
            table = torch.empty(most, self.positions.values["heads"], size, size, dtype=torch.float32, device="cpu")
            queries = 0 if positions.queries is None else positions.queries.data_ptr()
            inputs |= pack_parts(positions=(positions.keys.data_ptr(), queries, middle(positions.rows)))
        inputs |= pack_parts(score_bias=bias_fields(table))
        if written is not None:
            block = layout.shape[1]
            inputs |= pack_parts(pages=(written.k.data_ptr(), written.v.data_ptr(), 0, 0))
        out = torch.empty_like(x) if out is None else out
        for part, starts, lengths in layout.calls:
            rows = x[part]
            cos, sin = (0, 0) if tables is None else (each[part].data_ptr() for each in tables)
            slots = 0 if written is None else written.slots[part].data_ptr()
            keys = starts.data_ptr(), 0 if lengths is None else lengths.data_ptr()
            inputs |= pack_parts(
                rows=(rows.data_ptr(), out[part].data_ptr()),
                tables=(cos, sin, len(rows), 1, 0, self.tables or 0),
                step=(slots, 0, 0, *keys, 0, len(starts) - 1, block, 0),
            )
            self.run(inputs)
        return out

    def _one_by_one(self, x: Tensor, layout: RowLayout, tensors: CallTensors) -> Tensor:
        """Compute the layer with the products of its linear layers, of which torch's are faster for many rows."""
        rows = HeldRows(self, x, layout, tensors)
        for operation, unread in zip(self.operations, self._unread, strict=True):
            results = NATIVE[operation.kind].compute(operation, rows)
            rows.buffers |= {span.buffer: out for span, out in zip(operation.outputs, results, strict=True)}
            for buffer in unread:  # the next result gets its memory, which the caches still hold
                del rows.buffers[buffer]
        return rows.buffers[OUTPUT]


def attended_window(operations: Iterable[Operation]) -> int | None:
    """Return the window that a layer's attention is given, None for all tokens. Raises UntraceableError."""
    window = next(each for each in operations if each.kind == "attend").values["options"].get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        raise UntraceableError("its window is not a number of tokens")
    return window


def unread_after(operations: Sequence[Operation]) -> list[list[int]]:
    """Return the buffers that no operation reads any more after each of these."""
    last = dict[int, int]()
    for place, operation in enumerate(operations):
        last |= {span.buffer: place for span in (*operation.outputs, *operation.inputs)}
    return [
        [buffer for buffer, end in last.items() if end == place and buffer != OUTPUT]
        for place in range(len(operations))
    ]
