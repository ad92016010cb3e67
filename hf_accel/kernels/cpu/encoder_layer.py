"""A transformer encoder layer as one native call over sequences that stand end to end."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .attention import EVERY_KEY, bias_fields, checked_bias, lengths_of
from .decoder_layer import INPUT, OPERATIONS, OUTPUT, run_layer
from .float_linear import FloatLinear
from .integer_linear import IntegerLinear
from .library import DTYPES, FLOATS, Columns, LayerOp, ScoreBias, refuse_gradients, threads

# The buffers of a call, after its input and output. NORMED is used if the norms come first.
QKV, ATTENDED, PROJECTED, MIDDLE, INNER, SHRUNK, NORMED = range(2, 9)
KINDS = {name: number for number, name in enumerate(OPERATIONS)}


class LayerNormOf(NamedTuple):
    """The parameters of a LayerNorm: weight and bias [hidden] of a dtype of FLOATS, or None; eps."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


class EncoderParts(NamedTuple):
    """The parts of an encoder layer (Vaswani et al. 2017, "Attention Is All You Need").

    qkv: the projections of queries, keys and values side by side. projection: of what was attended to. up: with an
    activation, or a gate's epilogue. down: back to hidden. norms: the first and the second. norms_first: whether each
    part of the layer reads a norm of its input (ViT), x + part(norm(x)); otherwise its sum with the input is
    normalized (BERT), norm(x + part(x)).
    """

    qkv: IntegerLinear | FloatLinear
    projection: IntegerLinear | FloatLinear
    up: IntegerLinear | FloatLinear
    down: IntegerLinear | FloatLinear
    norms: tuple[LayerNormOf, LayerNormOf]
    norms_first: bool


class EncoderLayer:
    """Computes an encoder layer by the kernels that Python could call one by one, with their bits.

    num_heads, kv_heads: of queries, and of keys and values. scale: of the scores. reach: how many keys before and
    after its own a query sees, None for all. Neither other sequences nor threads change the bits of a sequence.
    """

    def __init__(
        self, parts: EncoderParts, num_heads: int, kv_heads: int, *, scale: float, reach: int | None = None
    ) -> None:
        qkv, self.hidden = parts.qkv.out_features, parts.qkv.in_features
        self.parts, self.num_heads, self.dim = parts, num_heads, qkv // (num_heads + 2 * kv_heads)
        attended = num_heads * self.dim
        found = [part.in_features for part in (parts.projection, parts.up, parts.down)]
        found += [part.out_features for part in (parts.projection, parts.down)]
        wanted = [attended, self.hidden, parts.up.out_features, self.hidden, self.hidden]
        if found != wanted or qkv != (num_heads + 2 * kv_heads) * self.dim or num_heads % kv_heads:
            raise UnsupportedError(
                f"encoder layer: {num_heads} heads and {kv_heads} of keys, projections of {qkv} numbers, and parts of "
                f"{found} numbers, which should be {wanted}"
            )
        inner = parts.up.out_features
        self._widths = [self.hidden, self.hidden, qkv, attended, self.hidden, self.hidden, inner, self.hidden]
        self._widths += [self.hidden] if parts.norms_first else []
        operations = self._pre_norm() if parts.norms_first else self._post_norm()
        self._ops = (LayerOp * len(operations))(*operations)
        (attend,) = [op for op in self._ops if op.kind == KINDS["attend_rows"]]
        attend.kv_heads, attend.scale = kv_heads, scale
        attend.window, attend.ahead = (0, EVERY_KEY) if reach is None else (reach + 1, reach)
        own = self._widths[OUTPUT + 1 :]
        starts = [0, 0, *(sum(own[:i]) for i in range(len(own)))]
        self._starts = (ctypes.c_int64 * len(starts))(*starts)
        self._fixed = ctypes.addressof(self._starts), len(self._ops), sum(own)

    def _post_norm(self) -> list[LayerOp]:
        parts = self.parts
        return [
            self._linear(parts.qkv, INPUT, QKV), self._attention(),
            self._linear(parts.projection, ATTENDED, PROJECTED), self._norm(PROJECTED, INPUT, MIDDLE),
            self._linear(parts.up, MIDDLE, INNER), self._linear(parts.down, INNER, SHRUNK),
            self._norm(SHRUNK, MIDDLE, OUTPUT),
        ]  # fmt: skip

    def _pre_norm(self) -> list[LayerOp]:
        parts = self.parts
        total = LayerOp(
            kind=KINDS["add"], x=self._place(MIDDLE), y=self._place(SHRUNK), out=self._place(OUTPUT), dim=self.hidden,
            scale=1.0,
        )  # fmt: skip
        return [
            self._norm(INPUT, None, NORMED), self._linear(parts.qkv, NORMED, QKV), self._attention(),
            self._linear(parts.projection, ATTENDED, PROJECTED), self._norm(PROJECTED, INPUT, NORMED, keep=MIDDLE),
            self._linear(parts.up, NORMED, INNER), self._linear(parts.down, INNER, SHRUNK), total,
        ]  # fmt: skip

    def _place(self, buffer: int | None, offset: int = 0) -> Columns:
        return Columns() if buffer is None else Columns(buffer, offset, self._widths[buffer])

    def _linear(self, part: IntegerLinear | FloatLinear, source: int, target: int) -> LayerOp:
        kind = KINDS["float_linear" if isinstance(part, FloatLinear) else "integer_linear"]
        return LayerOp(
            kind=kind, x=self._place(source), out=self._place(target), weight=part.address(), tile_rows=part.tile_rows
        )

    def _norm(self, source: int, other: int | None, target: int, *, keep: int | None = None) -> LayerOp:
        return LayerOp(
            kind=KINDS["layer_norm"], x=self._place(source), y=self._place(other), out=self._place(target),
            out2=self._place(keep), dim=self.hidden,
        )  # fmt: skip

    def _attention(self) -> LayerOp:
        keys = self.num_heads * self.dim
        values = (self._widths[QKV] + keys) // 2
        return LayerOp(
            kind=KINDS["attend_rows"], x=self._place(QKV), y=self._place(QKV, keys), z=self._place(QKV, values),
            out=self._place(ATTENDED), heads=self.num_heads, dim=self.dim, value_dim=self.dim,
        )  # fmt: skip

    def __call__(self, x: Tensor, starts: Tensor, *, bias: Tensor | None = None) -> Tensor:
        """x [N, hidden] of a dtype of FLOATS -> [N, hidden] of the same dtype.

        starts: [B + 1] int32, where each sequence begins, and N. bias: as `attend` takes it. Raises UnsupportedError
        for operands of other shapes or dtypes, and if a gradient is needed.
        """
        linears = self.parts[:4]
        floats = [tensor for part in linears if isinstance(part, FloatLinear) for tensor in part.weights + part.biases]
        norms = [tensor for norm in self.parts.norms for tensor in norm[:2]]
        refuse_gradients("encoder layer", x, bias, *floats, *norms)
        if x.shape[1:] != (self.hidden,) or x.dtype not in FLOATS or int(starts[-1]) != len(x):
            raise UnsupportedError(
                f"encoder layer: {x.dtype} {tuple(x.shape)}, of which sequences take {int(starts[-1])}; it takes all "
                f"rows of {self.hidden} numbers of {FLOATS}"
            )
        x, starts = x.contiguous(), starts.to(torch.int32).contiguous()
        if bias is not None:
            bias = checked_bias(bias, self.num_heads, [(length, length) for length in lengths_of(starts)])
        for linear in linears:
            linear.address()  # it looks where weights and biases are now
        ops = type(self._ops).from_buffer_copy(self._ops)  # another thread may call the layer meanwhile
        kept = self._point(ops, bias)
        out, dtype = torch.empty_like(x), DTYPES[x.dtype]
        run_layer(
            ctypes.addressof(ops), *self._fixed, x.data_ptr(), out.data_ptr(), 0, 0, len(x), 1, 0, 0,
            0, 0, 0, 0, 0, 0, starts.data_ptr(), 0, 0, len(starts) - 1, 0, dtype, 0, 0, 0, threads(),
        )  # fmt: skip
        del kept  # until here, because the operations name its memory
        return out

    def _point(self, ops: ctypes.Array[LayerOp], bias: Tensor | None) -> list[Tensor]:
        """Let the operations name the memory of the bias and the norms. Returns what this is."""
        kept = [] if bias is None else [bias]
        for op in ops:
            if op.kind == KINDS["attend_rows"]:
                op.score_bias = ScoreBias(*bias_fields(bias))
        norms = (op for op in ops if op.kind == KINDS["layer_norm"])
        for op, norm in zip(norms, self.parts.norms, strict=True):
            op.eps = norm.eps
            for name, tensor in (("weight", norm.weight), ("bias", norm.bias)):
                if tensor is None:
                    continue
                if tensor.shape != (self.hidden,) or tensor.dtype not in FLOATS:
                    raise UnsupportedError(
                        f"encoder layer: a norm's {name} of {tensor.dtype} {tuple(tensor.shape)} for {self.hidden}"
                    )
                kept.append(tensor.contiguous())
                setattr(op, name, kept[-1].data_ptr())
                setattr(op, f"{name}_dtype", DTYPES[tensor.dtype])
        return kept
