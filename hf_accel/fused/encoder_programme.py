"""A traced layer as one native call over sequences that stand end to end, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.cpu.attention import EVERY_KEY, bias_fields, middle
from ..kernels.cpu.layer_call import NO_SOURCE, run_layer
from ..kernels.cpu.library import DTYPES, dtypes_of_pages, threads
from ..recognition.call_form import BIAS
from ..recognition.distance_attention import DistanceAttention
from ..recognition.operation import OUTPUT, Operation, UntraceableError
from ..recognition.position_attention import BOTH, rows_of_positions
from ..recognition.symbols import Computed
from ..recognition.trace import WEIGHTS, Trace
from .encoder_rows import (
    NOTHING,
    CallTensors,
    PositionRows,
    RowLayout,
    WrittenRows,
    layout_of,
    layout_of_columns,
    layout_of_pairs,
    packed_layout,
    windowed_layout,
)
from .layer_programme import NativeOperations
from .modules import RotaryForm
from .native_operation import HeldRows
from .operations import NATIVE, refuse_over_rows
from .partial_rotation import rotation_over_rows
from .projections import UNLIMITED
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
    layer is given one. merges_bias: whether the bias of a call is [B * heads, T, T].
    """

    over_rows = True

    def __init__(
        self, trace: Trace, scale: float, table_dtype: torch.dtype | None = None, *, causal: Causal | None = None,
    ) -> None:  # fmt: skip
        refuse_over_rows(trace.operations)
        attends = next(operation.values for operation in trace.operations if operation.kind == "attend")
        self.layer_idx, self.rotates_last = trace.layer_idx, False
        self.causal, self.first_counts = causal is not None, causal is None or causal.first_counts
        self.window = attended_window(trace.operations) if causal is None else causal.window
        ahead = 0 if self.causal else EVERY_KEY if self.window is None else self.window - 1
        attention = Attention(scale, attends["options"].get("softcap"), self.window, ahead)
        super().__init__(trace, table_dtype, attention, torch.device("cpu"))
        rotations = [operation.values for operation in trace.operations if operation.kind == "rope"]
        dims = {values["dim"] for values in rotations}
        if len(dims) > 1:
            raise UntraceableError("it rotates heads of different sizes")
        if self.rotates_last and len({values["function"] for values in rotations}) > 1:
            raise UntraceableError("it rotates in two ways")
        self.tables: int | None = min(dims, default=None)
        self.biased_heads: int = attends["heads"] if attends["biased"] else 0
        self.own_bias: Computed | None = attends["own_bias"]
        self.positions = next((each for each in trace.operations if each.kind == "position_scores"), None)
        self.distances: DistanceAttention | None = (
            None if self.positions is None else self.positions.values.get("distances")
        )
        self._sees_pairs = self.positions is not None and (self.distances is None or self.distances.pairs)
        self.masks_rows = any(each.values["masked"] for each in trace.operations if each.kind == "row_conv")
        self._adds_mask: bool = attends["adds_mask"]
        self._masks_tokens: bool = attends.get("masks_tokens", False)
        self.merges_bias: bool = attends.get("merges_bias", False)
        self.returns_weights = WEIGHTS in (self.others or ())
        if BIAS in (self.others or ()) and not attends["biased"]:
            raise UntraceableError("it returns a bias that it does not add")
        self.max_tokens = UNLIMITED
        self._unread = unread_after(self.operations)
        self.compile(trace.widths)

    # -- while it is used ------------------------------------------------------------------------------

    def layout_of(self, mask: Tensor | None, batch: int, tokens: int) -> RowLayout | None:
        """Return the layout of a batch with this mask; None if the layer attends in another way than the mask says."""
        if self._adds_mask and mask is not None and not mask.is_floating_point():
            return None  # true is 1 where it is added
        if self.causal and mask is not None:
            return None
        if self._masks_tokens and mask is not None:  # 1 at each token
            plain = type(mask) is Tensor and mask.is_cpu and mask.shape == (batch, tokens)
            return layout_of_columns(mask == 1) if plain else None
        if self._sees_pairs and (mask is not None or self.distances is None):
            return layout_of_pairs(mask, batch, tokens)
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
        if self.causal or self.write is not None or self.window is not None or self._sees_pairs:
            return None
        return layout.with_padding()

    def to_write(self, layout: RowLayout) -> WrittenRows | None:
        """Return memory for the keys and the values of a batch; None if the layer writes none."""
        if self.write is None:
            return None
        values = self.write.values
        return layout.to_write(values["heads"], (values["dim"], values["value_dim"]), self.dtype)

    def positions_of(self, layout: RowLayout, given: Any, embeddings: Any) -> PositionRows | None:
        """Return the keys and queries of positions, by what a layer is given; None for another form of that."""
        assert self.positions is not None
        if self.distances is not None:
            return self._keys_of_distances(layout, given)
        distances, span = layout.distances(given), self.positions.values["span"]
        if {*self.positions.values["kinds"]} != BOTH:  # the module's own list, which may change
            return None
        if distances is None or type(embeddings) not in (Tensor, nn.Parameter) or embeddings.dtype is not self.dtype:
            return None
        by_tokens = self.positions.values["by_tokens"]
        rows = rows_of_positions(distances, span, layout.shape[1] if by_tokens else None)
        first, last = int(rows.min()), int(rows.max())
        table = embeddings[first : last + 1]
        if not embeddings.is_cpu or table.ndim != 2 or len(table) != last + 1 - first:
            return None
        keys, queries = (module(table).contiguous() for module in self.positions.modules)
        return PositionRows(keys, queries, (rows - first).int())

    def _keys_of_distances(self, layout: RowLayout, embeddings: Any) -> PositionRows | None:
        """Return the keys of distances, by a layer's embeddings or its table; None for embeddings of another form.

        Embeddings stand in the order from the largest distance to the smallest.
        """
        assert self.positions is not None
        (module,), values, tokens, most = self.positions.modules, self.positions.values, *sizes_of(layout)
        distances, heads = torch.arange(1 - most, most, device="cpu"), values["heads"]
        if isinstance(module, nn.Embedding):
            left, right = values["limits"]
            table = module.weight
            if table.dtype is not self.dtype or not table.is_cpu or table.shape != (left + right + 1, values["dim"]):
                return None
            keys, rows = table.repeat(1, heads), left - distances.clamp(-right, left)
        else:
            keys, rows = embeddings, tokens - 1 - distances
            plain = type(keys) is Tensor and keys.is_cpu and keys.dtype is self.dtype and keys.ndim == 3
            if not plain or len(keys) not in (1, layout.shape[0]) or keys.shape[1] != 2 * tokens - 1:
                return None
            if len(keys) > 1 and keys.stride(0) and not bool((keys == keys[:1]).all()):
                return None
            keys = module(keys[0])
        return PositionRows(keys.contiguous(), None, rows.int())

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
        table, places = None if bias is None else bias.table, (0, 0, 0)
        if positions is not None:
            assert self.positions is not None
            most, size = max(len(call.starts) for call in layout.calls) - 1, layout.ragged.max_q
            table = torch.empty(most, self.positions.values["heads"], size, size, dtype=torch.float32, device="cpu")
            queries = 0 if positions.queries is None else positions.queries.data_ptr()
            places = positions.keys.data_ptr(), queries, middle(positions.rows)
        biases = bias_fields(table)
        k, v, block = (0, 0, 0) if written is None else (*map(Tensor.data_ptr, written[:2]), layout.shape[1])
        dtype, count = DTYPES[self.dtype], threads()
        out = torch.empty_like(x) if out is None else out
        table_dtype, size = 0, self.tables or 0
        if size:
            assert tables is not None and self.table_dtype is not None
            table_dtype = DTYPES[self.table_dtype]
        for part, starts, lengths in layout.calls:
            rows = x[part]
            cos, sin = (0, 0) if tables is None else (each[part].data_ptr() for each in tables)
            run_layer(
                *self._fixed, rows.data_ptr(), out[part].data_ptr(), cos, sin, len(rows), 1, 0, size,
                k, v, 0, 0, 0 if written is None else written.slots[part].data_ptr(), 0, 0,
                starts.data_ptr(), 0 if lengths is None else lengths.data_ptr(),
                0, len(starts) - 1, block, 0, *biases, *places, *NO_SOURCE, 0,
                dtype, table_dtype, dtypes_of_pages(dtype, dtype), 0, count,
            )  # fmt: skip
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


def sizes_of(layout: RowLayout) -> tuple[int, int]:
    """Return the tokens of a row of a batch, and those of its longest sequence."""
    return layout.shape[1], layout.ragged.max_q


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
