"""A traced encoder layer as one native call over sequences that stand end to end, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..kernels.cpu.attention import EVERY_KEY, attend
from ..kernels.cpu.decoder_layer import run_layer
from ..kernels.cpu.library import ACTIVATIONS, DTYPES, FLOATS, threads
from ..kernels.cpu.row_kernels import activate, add, add_layer_norm, layer_norm, rope, rounds_each
from ..kernels.layouts import KV, AttentionOptions, Ragged
from ..recognition.encoder_trace import EncoderTrace, Vector
from ..recognition.operation import INPUT, OUTPUT, Operation, Span, UntraceableError
from ..recognition.unchanged import GLOBAL_HOOKS, Read, Reads
from ..tensors import PLAIN, integers, is_plain_tensor
from .layer_programme import KINDS, NativeOperations
from .modules import RotaryForm, form_of_rotation
from .projections import UNLIMITED

Tables = tuple[Tensor, Tensor]  # cos and sin

# The tokens of a native call for each thread, unless one sequence has more: its memory stays in the caches.
CALL_TOKENS = 256


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The places of a padded batch [B, T] that hold tokens: at least one in each row, which begins with one.

    index: of the tokens among B * T places, int64; None if there is no padding. ragged: the sequences, end to end.
    calls: parts of them for one native call each, as rows and as the [n + 1] places where sequences begin, int32.
    """

    shape: tuple[int, int]
    index: Tensor | None
    ragged: Ragged
    calls: tuple[tuple[slice, Tensor], ...]

    def rows(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [N, width], contiguous: the tokens end to end."""
        flat = x.reshape(-1, x.shape[-1])
        return flat if self.index is None else flat.index_select(0, self.index)

    def padded(self, rows: Tensor) -> Tensor:
        """[N, width] -> [B, T, width], with zeros at padding."""
        if self.index is None:
            return rows.view(*self.shape, -1)
        out = rows.new_zeros(self.shape[0] * self.shape[1], rows.shape[1])
        return out.index_copy_(0, self.index, rows).view(*self.shape, -1)

    def tables(self, tables: Tables) -> Tables | None:
        """[B or 1, T, dim] -> [N, dim]: of the places of the tokens; None for tables of another form."""
        cos, sin = tables
        shapes = [(batch, self.shape[1], cos.shape[-1]) for batch in (1, self.shape[0])]
        if cos.shape not in shapes or sin.shape != cos.shape or sin.dtype is not cos.dtype:
            return None
        if not all(type(each) in PLAIN and each.is_cpu for each in tables):
            return None
        cos, sin = (self.rows(each.expand(self.shape[0], -1, -1)).contiguous() for each in tables)
        return cos, sin


def windowed_layout(mask: Tensor | None, batch: int, tokens: int, window: int) -> RowLayout | None:
    """Return the layout of a batch whose queries see the keys at a distance of less than `window`, on both sides.

    The mask must say so of each query that is no padding, [B or 1, 1, T, T]. Padding must be on the right, because it
    counts in distances. If no token is as far from another, it is a mask as that of `layout_of`.
    """
    if tokens <= window:
        return layout_of(mask, batch, tokens)
    if type(mask) not in PLAIN or mask.ndim != 4 or not mask.is_cpu:  # type: ignore[union-attr]
        return None
    assert mask is not None
    if mask.shape[0] not in (1, batch) or mask.shape[1:] != (1, tokens, tokens):
        return None
    columns = mask[:, 0].diagonal(dim1=1, dim2=2)  # a token sees itself
    layout = layout_of(columns[:, None, None], batch, tokens)
    seen = _seen(mask[:, 0])
    if layout is None or seen is None:
        return None
    real = seen.diagonal(dim1=1, dim2=2)
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        return None
    places = torch.arange(tokens)
    near = (places[:, None] - places).abs() < window
    agrees = (seen == (real[:, None, :] & near)) | ~real[:, :, None]
    return layout if bool(agrees.all()) else None


def _seen(mask: Tensor) -> Tensor | None:
    """Return which keys a mask shows, as bool; None if its numbers do more than show and hide them."""
    if mask.dtype is torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    seen = mask == 0
    return seen if bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()) else None


def layout_of(mask: Tensor | None, batch: int, tokens: int) -> RowLayout | None:
    """Return the layout of a batch whose attention has this mask; None for a mask that does not say which are padding.

    mask: None, or [B or 1, 1, T or 1, T]: bool, or numbers that are added to scores. All queries must see the same
    keys, and the first token of each row, which models read for the whole row.
    """
    if mask is None:
        return _layout((batch, tokens), None, [tokens] * batch)
    if type(mask) not in PLAIN or mask.ndim != 4 or not mask.is_cpu:
        return None
    rows, heads, queries, keys = mask.shape
    if rows not in (1, batch) or heads != 1 or queries not in (1, tokens) or keys != tokens:
        return None
    columns = mask[:, 0, 0]
    if queries > 1 and mask.stride(2) and not bool((mask == mask[:, :, :1]).all()):
        return None
    seen = _seen(columns)
    if seen is None:
        return None
    columns = seen.expand(batch, tokens)
    lengths: list[int] = columns.sum(1).tolist()
    if min(lengths) == tokens:
        return _layout((batch, tokens), None, lengths)
    if not bool(columns[:, 0].all()):
        return None
    return _layout((batch, tokens), columns.flatten().nonzero().squeeze(1), lengths)


def _layout(shape: tuple[int, int], index: Tensor | None, lengths: list[int]) -> RowLayout:
    starts = [0, *accumulate(lengths)]
    longest, begins = max(lengths), integers(starts, dtype=torch.int32)
    ragged = Ragged(begins, integers(lengths, dtype=torch.int32), longest, longest)
    calls = [
        (
            slice(starts[first], starts[end]),
            begins if not first and end == len(lengths) else begins[first : end + 1] - starts[first],
        )
        for first, end in pairwise(_ends(starts))
    ]
    return RowLayout(shape, index, ragged, tuple(calls))


def _ends(starts: list[int]) -> Iterator[int]:
    """The sequences at which a native call ends, and the next one begins."""
    yield 0
    begin, most = 0, CALL_TOKENS * threads()
    for sequence in range(1, len(starts) - 1):
        if starts[sequence + 1] - starts[begin] > most:
            yield sequence
            begin = sequence
    yield len(starts) - 1


class EncoderProgramme(NativeOperations):
    """A traced encoder layer on the CPU.

    It holds addresses, and the values that the trace read: `is_current` says whether both are still the layer's.
    Raises UntraceableError for an operation that has no kernel.

    table_dtype: of cos and sin. window: a query sees the keys at a distance of less than this, None for all. tables:
    the size of the cos and sin of a token, None if the layer reads none.
    """

    def __init__(self, trace: EncoderTrace, scale: float, table_dtype: torch.dtype | None = None) -> None:
        self.dtype, self.width, self.arity, self.scale = trace.dtype, trace.widths[INPUT], trace.arity, scale
        self.table_dtype, self.window = table_dtype, attended_window(trace.operations)
        self.rotations: dict[int, RotaryForm] = {}  # by the number of the operation
        dims = {operation.values["dim"] for operation in trace.operations if operation.kind == "rope"}
        if len(dims) > 1:
            raise UntraceableError("it rotates heads of different sizes")
        self.tables: int | None = min(dims, default=None)
        self.reads, self.max_tokens = trace.reads, UNLIMITED
        self._hooks = [*trace.hooks, *GLOBAL_HOOKS]
        self.operations = trace.operations
        self.compile(trace.operations, trace.widths)
        self._frozen = Reads(self.reads)

    # -- while it is made ------------------------------------------------------------------------------

    def _fields(self, operation: Operation) -> dict[str, Any]:
        values = operation.values
        match operation.kind:
            case "layer_norm":
                return self._layer_norm(operation)
            case "attend":
                return {
                    "kind": KINDS["attend_rows"], "heads": values["heads"], "kv_heads": values["heads"],
                    "dim": values["dim"], "value_dim": values["dim"], "scale": self.scale,
                    "window": self.window or 0, "ahead": EVERY_KEY if self.window is None else self.window - 1,
                }  # fmt: skip
            case "gate":
                return {"dim": values["dim"], "activation": ACTIVATIONS[values["activation"]]}
            case "rope":
                return self._rope(operation)
            case "add" if "vector" in values:
                return super()._fields(operation) | {"weight": self._vector(values["vector"]).data_ptr()}
        return super()._fields(operation)

    def _rope(self, operation: Operation) -> dict[str, Any]:
        values, form = operation.values, None
        if self.table_dtype is not None:
            form = form_of_rotation(values["function"], self.dtype, self.table_dtype)
        if form is None or self.table_dtype is None:
            raise UntraceableError("its rotation has no native call")
        self.rotations[id(operation)] = form
        return {
            "heads": values["heads"], "kv_heads": values["kv_heads"], "dim": values["dim"],
            "interleaved": form.interleaved,
            "round_each": rounds_each(self.dtype, self.table_dtype, round_each=form.round_each),
        }  # fmt: skip

    def _vector(self, vector: Vector) -> Tensor:
        """Return the tensor of a parameter that scales columns. Raises UntraceableError."""
        tensor = vector.parameter
        self.reads.append(Read(vector.owner, vector.name, tensor))
        if not is_plain_tensor(tensor) or not tensor.is_cpu or not tensor.is_contiguous():
            raise UntraceableError("a scale of columns has no native call")
        self._tensors.append(tensor)
        return tensor

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

    # -- while it is used ------------------------------------------------------------------------------

    def is_current(self) -> bool:
        return self._frozen.hold() and self.has_memory()

    def hooks(self) -> Iterator[Any]:
        """The hooks of the modules that are not called."""
        for each in self._hooks:
            yield from each.values()

    def layout_of(self, mask: Tensor | None, batch: int, tokens: int) -> RowLayout | None:
        """Return the layout of a batch with this mask; None if the layer attends in another way than the mask says."""
        if self.window is None:
            return layout_of(mask, batch, tokens)
        return windowed_layout(mask, batch, tokens, self.window)

    def __call__(self, x: Tensor, layout: RowLayout, tables: Tables | None = None) -> Tensor:
        """x: [N, width], contiguous, of the dtype of the trace: the tokens of the layout -> [N, width].

        tables: cos and sin, [N, self.tables] of table_dtype, contiguous.
        """
        if len(x) > self.max_tokens:
            return self._one_by_one(x, layout.ragged, tables)
        out, dtype, count = torch.empty_like(x), DTYPES[self.dtype], threads()
        table_dtype, size = 0, self.tables or 0
        if size:
            assert tables is not None and self.table_dtype is not None
            table_dtype = DTYPES[self.table_dtype]
        for part, starts in layout.calls:
            rows = x[part]
            cos, sin = (0, 0) if tables is None else (each[part].data_ptr() for each in tables)
            run_layer(
                *self._fixed, rows.data_ptr(), out[part].data_ptr(), cos, sin, len(rows), 1, 0, size,
                0, 0, 0, 0, 0, 0, starts.data_ptr(), 0, 0, len(starts) - 1, 0, dtype, table_dtype, 0, 0, count,
            )  # fmt: skip
        return out

    def _one_by_one(self, x: Tensor, ragged: Ragged, tables: Tables | None) -> Tensor:
        """Compute the layer with the products of its linear layers, of which torch's are faster for many rows."""
        buffers = {INPUT: x}

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
                    heads = values["heads"], values["dim"]
                    q, k, v = (at(span, heads[0] * heads[1]).view(-1, *heads) for span in places)
                    options = AttentionOptions(self.scale, causal=False, window=self.window)
                    ahead = None if self.window is None else self.window - 1
                    results = [attend(q, KV(k, v), options, ragged, ahead=ahead).flatten(1)]
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
                    results = self._norm(operation.modules[0], terms, keep=len(operation.outputs) == 2)
                case _:
                    first, second = (at(span, values["dim"]) for span in places)
                    vector: Vector | None = values.get("vector")
                    results = [add(first, second, values["factor"] if vector is None else vector.parameter)]
            buffers |= {span.buffer: result for span, result in zip(operation.outputs, results, strict=True)}
        return buffers[OUTPUT]

    @staticmethod
    def _norm(norm: Any, terms: list[Tensor], *, keep: bool) -> list[Tensor]:
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
