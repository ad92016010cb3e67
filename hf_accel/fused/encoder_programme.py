"""A traced encoder layer as one native call over sequences that stand end to end, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.cpu.attention import EVERY_KEY, attend, bias_fields, write_pages
from ..kernels.cpu.decoder_layer import run_layer
from ..kernels.cpu.library import ACTIVATIONS, DTYPES, threads
from ..kernels.cpu.row_kernels import activate, add, add_layer_norm, layer_norm, rms_norm, rope
from ..kernels.layouts import KV, AttentionOptions
from ..recognition.encoder_trace import EncoderTrace, Vector
from ..recognition.operation import INPUT, OUTPUT, Operation, Span, UntraceableError
from ..recognition.stand_ins import Computed
from ..recognition.unchanged import GLOBAL_HOOKS, Read, Reads
from ..tensors import is_plain_tensor
from .encoder_rows import NOTHING, Bias, CallTensors, RowLayout, WrittenRows, layout_of, windowed_layout
from .layer_programme import KINDS, NativeOperations
from .modules import RotaryForm
from .norms import NormForm
from .projections import UNLIMITED


class Causal(NamedTuple):
    """Attention to the keys up to a query's own: the last `window` of them, or all.

    first_counts: whether models read the first place of a row, which then must hold a token.
    """

    window: int | None = None
    first_counts: bool = False


class EncoderProgramme(NativeOperations):
    """A traced encoder layer on the CPU.

    It holds addresses, and the values that the trace read: `is_current` says whether both are still the layer's.
    Raises UntraceableError for an operation that has no kernel.

    table_dtype: of cos and sin. window: a query sees the keys at a distance of less than this, None for all. causal:
    only those up to its own. tables: the size of the cos and sin of a token, None if the layer reads none. write: the
    operation that writes keys and values to a cache, None if there is none. biased_heads: the heads of the bias that
    is added to scores, 0 if there is none. own_bias: computes it, None if the layer is given one.
    """

    def __init__(
        self, trace: EncoderTrace, scale: float, table_dtype: torch.dtype | None = None,
        *, causal: Causal | None = None,
    ) -> None:  # fmt: skip
        self.dtype, self.width, self.others, self.scale = trace.dtype, trace.widths[INPUT], trace.others, scale
        self.table_dtype, self.causal = table_dtype, causal is not None
        self.first_counts = causal is None or causal.first_counts
        self.window = attended_window(trace.operations) if causal is None else causal.window
        self.ahead = 0 if self.causal else EVERY_KEY if self.window is None else self.window - 1
        self.rotations: dict[int, RotaryForm] = {}  # by the number of the operation
        self.norms: dict[int, NormForm] = {}
        dims = {operation.values["dim"] for operation in trace.operations if operation.kind == "rope"}
        if len(dims) > 1:
            raise UntraceableError("it rotates heads of different sizes")
        self.tables: int | None = min(dims, default=None)
        self.layer_idx = trace.layer_idx
        self.write = next((operation for operation in trace.operations if operation.kind == "write"), None)
        attends = next(operation.values for operation in trace.operations if operation.kind == "attend")
        self.biased_heads: int = attends["heads"] if attends["biased"] else 0
        self.own_bias: Computed | None = attends["own_bias"]
        self._adds_mask: bool = attends["adds_mask"]
        if any(self.others or ()) and not attends["biased"]:
            raise UntraceableError("it returns a bias that it does not add")
        self.reads, self.max_tokens = trace.reads, UNLIMITED
        self._hooks = [*trace.hooks, *GLOBAL_HOOKS]
        self.operations = trace.operations
        self.compile(trace.operations, trace.widths)
        self._frozen = Reads(self.reads)

    # -- while it is made ------------------------------------------------------------------------------

    def _fields(self, operation: Operation) -> dict[str, Any]:
        values = operation.values
        match operation.kind:
            case "attend":
                return {
                    "kind": KINDS["attend_rows"], "heads": values["heads"], "kv_heads": values["kv_heads"],
                    "dim": values["dim"], "value_dim": values["dim"], "scale": self.scale,
                    "window": self.window or 0, "ahead": self.ahead, "softcap": values["options"].get("softcap") or 0,
                }  # fmt: skip
            case "gate":
                return {"dim": values["dim"], "activation": ACTIVATIONS[values["activation"]]}
            case "add" if "vector" in values:
                return super()._fields(operation) | {"weight": self._vector(values["vector"]).data_ptr()}
        return super()._fields(operation)

    def norm_form(self, operation: Operation) -> NormForm:
        form = self.norms[id(operation)] = super().norm_form(operation)
        return form

    def rotary_form(self, operation: Operation) -> RotaryForm:
        form = self.rotations[id(operation)] = super().rotary_form(operation)
        return form

    def _vector(self, vector: Vector) -> Tensor:
        """Return the tensor of a parameter that scales columns. Raises UntraceableError."""
        tensor = vector.parameter
        self.reads.append(Read(vector.owner, vector.name, tensor))
        if not is_plain_tensor(tensor) or not tensor.is_cpu or not tensor.is_contiguous():
            raise UntraceableError("a scale of columns has no native call")
        self._tensors.append(tensor)
        return tensor

    # -- while it is used ------------------------------------------------------------------------------

    def is_current(self) -> bool:
        return self._frozen.hold() and self.has_memory()

    def hooks(self) -> Iterator[Any]:
        """The hooks of the modules that are not called."""
        for each in self._hooks:
            yield from each.values()

    def layout_of(self, mask: Tensor | None, batch: int, tokens: int) -> RowLayout | None:
        """Return the layout of a batch with this mask; None if the layer attends in another way than the mask says."""
        if self._adds_mask and mask is not None and not mask.is_floating_point():
            return None  # true is 1 where it is added
        if self.causal and mask is not None:
            return None
        if self.causal or self.window is None:
            return layout_of(mask, batch, tokens)
        return windowed_layout(mask, batch, tokens, self.window)

    def with_padding(self, layout: RowLayout) -> RowLayout | None:
        """Return the layout in which padding is computed too; None if stock computes something else there."""
        if self.causal or self.write is not None or self.window is not None:
            return None
        return layout.with_padding()

    def to_write(self, layout: RowLayout) -> WrittenRows | None:
        """Return memory for the keys and the values of a batch; None if the layer writes none."""
        if self.write is None:
            return None
        values = self.write.values
        return layout.to_write(values["heads"], (values["dim"], values["value_dim"]), self.dtype)

    def __call__(self, x: Tensor, layout: RowLayout, tensors: CallTensors = NOTHING) -> Tensor:
        """x: [N, width], contiguous, of the dtype of the trace: the tokens of the layout -> [N, width].

        tensors: cos and sin, [N, self.tables] of table_dtype, contiguous; the bias of the layout, for
        self.biased_heads; and what `to_write` made, to be filled.
        """
        if len(x) > self.max_tokens:
            return self._one_by_one(x, layout, tensors)
        tables, bias, written = tensors
        biases = bias_fields(None if bias is None else bias.table)
        k, v, block = (0, 0, 0) if written is None else (*map(Tensor.data_ptr, written[:2]), layout.shape[1])
        out, dtype, count = torch.empty_like(x), DTYPES[self.dtype], threads()
        table_dtype, size = 0, self.tables or 0
        if size:
            assert tables is not None and self.table_dtype is not None
            table_dtype = DTYPES[self.table_dtype]
        for part, starts, lengths in layout.calls:
            rows = x[part]
            cos, sin = (0, 0) if tables is None else (each[part].data_ptr() for each in tables)
            run_layer(
                *self._fixed, rows.data_ptr(), out[part].data_ptr(), cos, sin, len(rows), 1, 0, size,
                k, v, 0, 0, 0 if written is None else written.slots[part].data_ptr(), 0,
                starts.data_ptr(), 0 if lengths is None else lengths.data_ptr(),
                0, len(starts) - 1, block, *biases, dtype, table_dtype, dtype, 0, count,
            )  # fmt: skip
        return out

    def _one_by_one(self, x: Tensor, layout: RowLayout, tensors: CallTensors) -> Tensor:
        """Compute the layer with the products of its linear layers, of which torch's are faster for many rows."""
        (tables, bias, written), buffers = tensors, {INPUT: x}

        def at(span: Span, width: int) -> Tensor:
            buffer = buffers[span.buffer]
            return buffer if buffer.shape[1] == width else buffer.narrow(1, span.offset, width)

        for operation in self.operations:
            values, places = operation.values, operation.inputs
            match operation.kind:
                case "linear":
                    (linear,) = operation.modules
                    out = linear(at(places[0], linear.in_features))  # type: ignore[arg-type]
                    results = [activate(out, values["activation"]) if "activation" in values else out]
                case "attend":
                    dim, counts = values["dim"], (values["heads"], values["kv_heads"], values["kv_heads"])
                    qkv = [
                        at(span, heads * dim).view(-1, heads, dim) for span, heads in zip(places, counts, strict=True)
                    ]
                    results = [self._attend(qkv, layout, bias, values["options"].get("softcap"))]
                case "write":
                    assert written is not None
                    heads, dim = values["heads"], values["dim"]
                    keys, vals = (at(span, heads * dim).view(-1, heads, dim) for span in places)
                    write_pages(keys, vals, KV(written.k, written.v), written.slots)
                    results = []
                case "gated":
                    x_in = at(places[0], operation.modules[0].in_features)  # type: ignore[arg-type]
                    gate, up = (module(x_in) for module in operation.modules)
                    results = [activate(gate, values["epilogue"], y=up)]
                case "norm":
                    heads, dim = values["heads"], values["dim"]
                    x_in = at(places[0], heads * dim).reshape(len(x), heads, dim)
                    results = [self._rms_norm(operation, x_in).flatten(1)]
                case "gate":
                    gate, up = (at(span, values["dim"]) for span in places)
                    results = [activate(gate, values["activation"], y=up)]
                case "rope":
                    assert tables is not None
                    sizes = ((values[name], values["dim"]) for name in ("heads", "kv_heads"))
                    q, k = (
                        at(span, size[0] * size[1]).view(-1, *size).transpose(0, 1)[None]
                        for span, size in zip(places, sizes, strict=True)
                    )
                    form = self.rotations[id(operation)]
                    interleaved, round_each = form.interleaved, form.round_each
                    rotated = rope(q, k, *tables, interleaved=interleaved, round_each=round_each)
                    results = [each[0].transpose(0, 1).reshape(len(x), -1) for each in rotated]
                case "layer_norm":
                    terms = [at(span, values["dim"]) for span in places]
                    results = self._normalized(operation.modules[0], terms, keep=len(operation.outputs) == 2)
                case _:
                    first, second = (at(span, values["dim"]) for span in places)
                    vector: Vector | None = values.get("vector")
                    results = [add(first, second, values["factor"] if vector is None else vector.parameter)]
            buffers |= {span.buffer: result for span, result in zip(operation.outputs, results, strict=True)}
        return buffers[OUTPUT]

    def _attend(self, qkv: list[Tensor], layout: RowLayout, bias: Bias | None, softcap: float | None) -> Tensor:
        q, k, v = qkv
        options = AttentionOptions(self.scale, causal=self.causal, window=self.window, softcap=softcap)
        ahead = None if self.causal or self.ahead == EVERY_KEY else self.ahead
        kv, table = KV(layout.keys_of(k), layout.keys_of(v)), None if bias is None else bias.table
        return attend(q, kv, options, layout.ragged, ahead=ahead, bias=table).flatten(1)

    def _rms_norm(self, operation: Operation, x: Tensor) -> Tensor:
        form, weight = self.norms[id(operation)], operation.modules[0].weight
        return rms_norm(x, weight, form.eps, offset=form.offset, round_first=form.round_first)  # type: ignore[arg-type]

    @staticmethod
    def _normalized(norm: Any, terms: list[Tensor], *, keep: bool) -> list[Tensor]:
        if keep:
            return list(add_layer_norm(terms[0], terms[1], norm.weight, norm.bias, eps=norm.eps))
        y = terms[1] if len(terms) == 2 else None
        return [layer_norm(terms[0], norm.weight, norm.bias, norm.eps, y=y)]


def attended_window(operations: Iterable[Operation]) -> int | None:
    """Return the window that a layer's attention is given, None for all tokens. Raises UntraceableError."""
    window = next(each for each in operations if each.kind == "attend").values["options"].get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        raise UntraceableError("its window is not a number of tokens")
    return window
