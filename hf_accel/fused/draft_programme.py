"""A draft head as one native call: its tokens one after the other, each by what it reads, one layer and its logits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.storage import KVStorage
from ..kernels.cpu.attention import NO_BIAS
from ..kernels.cpu.draws import LIKELIEST_DRAWS, Draws
from ..kernels.cpu.float_linear import FloatLinear
from ..kernels.cpu.layer_call import KINDS, NO_SOURCE, NO_STATES, Columns, LayerOp, run_draft
from ..kernels.cpu.library import DTYPES, threads
from ..recognition.operation import UntraceableError
from ..recognition.unchanged import HOOKS
from ..tensors import integers, is_plain_tensor
from .layer_programme import CallFields, LayerPages, LayerProgramme
from .norms import norm_form
from .projections import UNLIMITED, make_call

FUSED_ROW = 2  # the buffer of what `fuse` reads: the norms of an embedding and of a state, side by side


@dataclass(frozen=True)
class HeadParts:
    """The parts of a draft head besides its layer.

    embeddings: [V, H]. token_norm, state_norm, fuse: what is done with the embedding and the state of a row.
    last_norm, words: what is done with what the layer gives: the next state, and the logits of it. known: [N] int64,
    the ids of the tokens that `words` knows; None if these are 0, 1, 2, ...
    """

    embeddings: Tensor
    token_norm: nn.Module
    state_norm: nn.Module
    fuse: nn.Module
    last_norm: nn.Module
    words: nn.Module
    known: Tensor | None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.token_norm, self.state_norm, self.fuse, self.last_norm, self.words


@dataclass(frozen=True)
class TreeRoom:
    """Trees of n sequences are drafted with this (EAGLE-2, 2406.16858), and written to it.

    width: the tokens of a step from which the next one goes on. nodes: [n] int64, the most tokens of each tree.
    spare: [2, n, width, S] int32, blocks for the last tokens of each of these; S hold all that is written behind the
    first step. tokens, parents: [n, most], written: each token, and the one that it follows, -1 for none. counts: [n],
    written.
    """

    width: int
    nodes: Tensor
    spare: Tensor
    tokens: Tensor
    parents: Tensor
    counts: Tensor

    @classmethod
    def of(cls, width: int, nodes: list[int], spare: Tensor) -> TreeRoom:
        shape = len(nodes), max(nodes)
        made = (torch.zeros(size, dtype=torch.int64) for size in (shape, shape, shape[:1]))
        return cls(width, integers(nodes), spare, *made)


@dataclass(frozen=True)
class Choice:
    """The tokens of a draft are chosen in this way.

    numbers: [steps, n] random numbers, see Draws.numbers; None if none are needed. probabilities: [steps, n, V]
    float32 zeros, to which those are written that the tokens of chains are drawn from; None for others.
    """

    draws: Draws = LIKELIEST_DRAWS
    numbers: Tensor | None = None
    probabilities: Tensor | None = None
    tree: TreeRoom | None = None


LIKELIEST_TOKENS = Choice()


@dataclass(frozen=True)
class DraftRows:
    """A draft reads and writes this. The first step reads N rows of n sequences, each later step rows of its own.

    ids, positions, slots: [N] int64. states: [N, H], read with a stride. block_table, cu_q, kv_len: as in Ragged,
    those of the first step; for chains with the blocks of all. ends: [n] int64, the last row of each sequence in the
    first step. going: for each step, how many of the sequences go on, the first ones.
    """

    ids: Tensor
    states: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    cu_q: Tensor
    kv_len: Tensor
    ends: Tensor
    going: list[int]
    choice: Choice = LIKELIEST_TOKENS


class DraftProgramme:
    """Drafts for many sequences in one native call.

    layer: the head's layer. tables: cos and sin, [1, P, D], of the positions 0 to P - 1; None if the layer has none. A
    draft of other positions is an error of its caller. Raises UntraceableError for a part that has no native call.
    """

    def __init__(self, layer: LayerProgramme, parts: HeadParts, tables: tuple[Tensor, Tensor] | None) -> None:
        if not layer.is_one_call:
            raise UntraceableError("its layer calls a module, or keeps compressed keys")
        self.layer, self.parts, self.tables = layer, parts, tables
        self._hooks = [vars(module)[name] for module in parts.modules for name in HOOKS]
        self._calls: list[Any] = []
        self.hidden, dtype = layer.width, layer.dtype
        if layer.biased_heads or layer.source is not None:
            raise UntraceableError("its layer reads more than its own pages")
        if parts.embeddings.dtype is not dtype or parts.embeddings.shape[1] != self.hidden:
            raise UntraceableError("its embeddings have another dtype or size than its states")
        if not is_plain_tensor(parts.embeddings) or not parts.embeddings.is_contiguous():
            raise UntraceableError("its embeddings are not one table")
        size, pair = self.hidden, 2 * self.hidden
        fuse, words = self._linear(parts.fuse, pair), self._linear(parts.words, size)
        self.tokens = words[1]
        if fuse[1] != size or (parts.known is not None and len(parts.known) != self.tokens):
            raise UntraceableError("its parts have other sizes")
        row = size + self.tokens
        self._fuse = _operations(
            [
                self._norm(parts.token_norm, x=Columns(0, 0, pair), out=Columns(FUSED_ROW, 0, pair)),
                self._norm(parts.state_norm, x=Columns(0, size, pair), out=Columns(FUSED_ROW, size, pair)),
                LayerOp(**fuse[0], x=Columns(FUSED_ROW, 0, pair), out=Columns(1, 0, size)),
            ],
            pair,
        )
        self._words = _operations(
            [
                self._norm(parts.last_norm, x=Columns(0, 0, size), out=Columns(1, 0, row)),
                LayerOp(**words[0], x=Columns(1, 0, row), out=Columns(1, size, row)),
            ],
            0,
        )
        self._pointers = [tensor.data_ptr() for tensor in self._read()]

    def _norm(self, module: nn.Module, **places: Columns) -> LayerOp:
        form, weight = norm_form(module, self.layer.dtype), module._parameters.get("weight")
        if form is None or weight is None or not weight.is_contiguous() or len(weight) != self.hidden:
            raise UntraceableError("a norm of the head has no native call")
        return LayerOp(
            kind=KINDS["norm"], weight=weight.data_ptr(), weight_dtype=DTYPES[weight.dtype], heads=1, dim=self.hidden,
            eps=form.eps, offset=form.offset, round_first=form.round_first, **places,
        )  # fmt: skip

    def _linear(self, module: nn.Module, inputs: int) -> tuple[dict[str, Any], int]:
        """Return fields of the operation of a linear layer, and the number of its outputs."""
        call = make_call((module,), None, UNLIMITED)
        if call is None or call.in_features != inputs:
            raise UntraceableError("a linear layer of the head has no native call")
        if isinstance(call, FloatLinear) and call.weights[0].dtype is not self.layer.dtype:
            raise UntraceableError("a linear layer of the head has another dtype than its states")
        self._calls.append(call)
        kind = "float_linear" if isinstance(call, FloatLinear) else "integer_linear"
        return {"kind": KINDS[kind], "weight": call.address(), "tile_rows": call.tile_rows}, call.out_features

    def _read(self) -> Iterator[Tensor]:
        """Iterate over the tensors whose addresses the operations hold."""
        yield self.parts.embeddings
        for module in self.parts.modules:
            yield from (tensor for tensor in module._parameters.values() if tensor is not None)

    def is_current(self) -> bool:
        """Return whether nothing has changed that the call depends on, and no hook wants to see a module."""
        if any(self._hooks) or not (self.layer.is_current() and self.layer.is_unobserved()):
            return False
        return [tensor.data_ptr() for tensor in self._read()] == self._pointers

    def __call__(self, rows: DraftRows, pages: KVStorage) -> tuple[Tensor, Tensor, Tensor]:
        """Draft. Returns the tokens of chains [steps, n] int64; and of the last step the logits [rows, N] of the
        tokens that the head knows, and the head's own states [rows, H].
        """
        choice, tree = rows.choice, rows.choice.tree
        width = 1 if tree is None else tree.width
        count, steps, row = len(rows.kv_len), len(rows.going), self.hidden + self.tokens
        out = rows.states.new_empty(count * width, row)
        drafted = torch.zeros(steps, count, dtype=torch.int64) if tree is None else tree.tokens
        dtype, using = DTYPES[self.layer.dtype], threads()
        states = rows.states if rows.states.stride(1) == 1 else rows.states.contiguous()
        held = rows.slots, rows.block_table, rows.cu_q, rows.kv_len
        slots, *read = (tensor.data_ptr() for tensor in held)
        places = slots, 0, *read, rows.block_table.stride(0), count, pages.block_size, 0
        layer = CallFields((0, 0, len(rows.ids), 1, 0, 0), places, using, held)
        singles, going = _numbers(count * width + 1), integers(rows.going)
        cos, sin = (0, 0) if self.tables is None else (table.data_ptr() for table in self.tables)
        run_draft(
            *_fields(self._fuse, 0, dtype, using),
            *self.layer.fields((0, 0), layer, LayerPages(pages.pages)),
            *_fields(self._words, out.data_ptr(), dtype, using),
            self.parts.embeddings.data_ptr(), cos, sin, rows.positions.data_ptr(), rows.ids.data_ptr(),
            states.data_ptr(), rows.ends.data_ptr(), going.data_ptr(), singles.data_ptr(),
            *map(_address, (self.parts.known, choice.numbers, choice.probabilities)),
            *((0, 0) if tree is None else (tree.spare.data_ptr(), tree.nodes.data_ptr())), drafted.data_ptr(),
            *((0, 0) if tree is None else (tree.parents.data_ptr(), tree.counts.data_ptr())), states.stride(0),
            0 if self.tables is None else self.tables[0].shape[-1], self.hidden, self.tokens, steps,
            width, drafted.shape[1], 0 if tree is None else tree.spare.shape[-1],
            0 if choice.probabilities is None else choice.probabilities.shape[-1],
            choice.draws.top_k, choice.draws.temperature, choice.draws.top_p, choice.draws.kind, 0,
        )  # fmt: skip
        return drafted, out[:, self.hidden :], out[:, : self.hidden]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


Operations = tuple[Any, Any, int]  # the structs, where their buffers begin, and the numbers of a row in all buffers


def _operations(operations: Sequence[LayerOp], width: int) -> Operations:
    return (LayerOp * len(operations))(*operations), (ctypes.c_int64 * 3)(), width


def _fields(operations: Operations, out: int, dtype: int, using: int) -> tuple[int, ...]:
    """Return the fields of a LayerCall of operations on rows alone."""
    structs, starts, width = operations
    fixed = ctypes.addressof(structs), ctypes.addressof(starts), len(structs), width
    return (*fixed, 0, out, *_NO_PAGES, *NO_BIAS, 0, 0, 0, *NO_SOURCE, *NO_STATES, 0, dtype, 0, 0, 0, using)


_NO_PAGES = (0, 0, 0, 1, *(0,) * 15)  # cos to num_written of a LayerCall, for one batch
_singles = integers(range(64), dtype=torch.int32)


def _numbers(count: int) -> Tensor:
    """Return 0, 1, 2, ..., at least `count` numbers, int32."""
    global _singles
    if len(_singles) < count:
        _singles = integers(range(2 * count), dtype=torch.int32)
    return _singles
