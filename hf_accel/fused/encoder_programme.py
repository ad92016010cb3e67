"""A traced encoder layer as one native call over sequences that stand end to end, without padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..kernels.cpu.attention import EVERY_KEY, attend
from ..kernels.cpu.decoder_layer import run_layer
from ..kernels.cpu.library import DTYPES, FLOATS, threads
from ..kernels.cpu.row_kernels import activate, add, add_layer_norm, layer_norm
from ..kernels.layouts import KV, AttentionOptions, Ragged
from ..recognition.encoder_trace import EncoderTrace, Vector
from ..recognition.trace import INPUT, OUTPUT, Operation, Span, UntraceableError
from ..recognition.unchanged import GLOBAL_HOOKS, Read, Reads
from ..tensors import PLAIN, integers, is_plain_tensor
from .layer_programme import KINDS, NativeOperations
from .projections import UNLIMITED

# The tokens of a native call, unless one sequence has more: its memory stays in the caches.
CALL_TOKENS = 1024


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
    if mask.dtype is not torch.bool:
        if not mask.is_floating_point():
            return None
        hidden = columns <= torch.finfo(mask.dtype).min
        columns = columns == 0
        if not bool((columns | hidden).all()):
            return None
    columns = columns.expand(batch, tokens)
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
    begin = 0
    for sequence in range(1, len(starts) - 1):
        if starts[sequence + 1] - starts[begin] > CALL_TOKENS:
            yield sequence
            begin = sequence
    yield len(starts) - 1


class EncoderProgramme(NativeOperations):
    """A traced encoder layer on the CPU.

    It holds addresses, and the values that the trace read: `is_current` says whether both are still the layer's.
    Raises UntraceableError for an operation that has no kernel.
    """

    def __init__(self, trace: EncoderTrace, scale: float) -> None:
        self.dtype, self.width, self.arity, self.scale = trace.dtype, trace.widths[INPUT], trace.arity, scale
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
                    "dim": values["dim"], "value_dim": values["dim"], "scale": self.scale, "ahead": EVERY_KEY,
                }  # fmt: skip
            case "add" if "vector" in values:
                return super()._fields(operation) | {"weight": self._vector(values["vector"]).data_ptr()}
        return super()._fields(operation)

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

    def __call__(self, x: Tensor, layout: RowLayout) -> Tensor:
        """x: [N, width], contiguous, of the dtype of the trace: the tokens of the layout -> [N, width]."""
        if len(x) > self.max_tokens:
            return self._one_by_one(x, layout.ragged)
        out, dtype, count = torch.empty_like(x), DTYPES[self.dtype], threads()
        for part, starts in layout.calls:
            rows = x[part]
            run_layer(
                *self._fixed, rows.data_ptr(), out[part].data_ptr(), 0, 0, len(rows), 1, 0, 0,
                0, 0, 0, 0, 0, 0, starts.data_ptr(), 0, 0, len(starts) - 1, 0, dtype, 0, 0, 0, count,
            )  # fmt: skip
        return out

    def _one_by_one(self, x: Tensor, ragged: Ragged) -> Tensor:
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
                    results = [attend(q, KV(k, v), AttentionOptions(self.scale, causal=False), ragged).flatten(1)]
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
