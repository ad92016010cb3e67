"""A draft head as one native call: its tokens one after the other, each by what it reads, one layer and its logits."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cache.storage import KVStorage
from ..errors import HfAccelError
from ..hardware import UNLIMITED
from ..kernels.cpu.draws import LIKELIEST_DRAWS, Draws
from ..kernels.cpu.float_linear import FloatLinear
from ..kernels.cpu.layer_call import KINDS, Columns, LayerOp, Parts, layer_calls, pack_parts, run_draft
from ..kernels.cpu.library import DTYPES, page_dtype, threads
from ..kernels.layouts import KV
from ..recognition.operation import UntraceableError
from ..recognition.unchanged import HOOKS, Read, Reads
from ..tensors import is_plain_tensor
from .layer_programme import LayerProgramme
from .norms import norm_form
from .projections import make_call
from .state_rows import StateRows

FUSED_ROW = 2  # the buffer of what `fuse` reads: the norms of an embedding and of a state, side by side


@dataclass(frozen=True)
class HeadParts:
    """The parts of a draft head besides its layer.

    embeddings: [V, H]. narrow: makes what the head reads of the states of its target. token_norm, state_norm, fuse:
    what is done with the embedding and the state of a row. last_norm, words: what is done with what the layer gives:
    the next state, and the logits of it. known: [N] int64, the ids of the tokens that `words` knows; None if these
    are 0, 1, 2, ...
    """

    embeddings: Tensor
    narrow: nn.Module
    token_norm: nn.Module
    state_norm: nn.Module
    fuse: nn.Module
    last_norm: nn.Module
    words: nn.Module
    known: Tensor | None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.narrow, self.token_norm, self.state_norm, self.fuse, self.last_norm, self.words


@dataclass(frozen=True)
class TreeRoom:
    """Trees of sequences are drafted with this (EAGLE-2, 2406.16858).

    width: the tokens of a step from which the next one goes on. spare: [2, n, width, S], blocks for the last tokens of
    each of these; S hold all that is written behind the first step.
    """

    width: int
    spare: list[int]
    num_spare: int


@dataclass(frozen=True)
class Choice:
    """The tokens of a draft are chosen in this way.

    numbers: of each step those of each sequence, see Draws.numbers; None if none are needed. probabilities:
    [steps, n, V] float32 zeros, to which those are written that the tokens of chains are drawn from; None for others.
    """

    draws: Draws = LIKELIEST_DRAWS
    numbers: array[Any] | None = None
    probabilities: Tensor | None = None
    tree: TreeRoom | None = None


LIKELIEST_TOKENS = Choice()


class SequenceRows(NamedTuple):
    """One sequence of a draft; the fields are those of DraftedSequence in draft.h.

    rows: those that the first step reads. before: the tokens that its blocks hold before them. position: of the first
    row. steps: those that draft for it. nodes: the most tokens of its tree; 0 for a chain.
    """

    rows: int
    before: int
    position: int
    steps: int
    nodes: int


class DraftRows(NamedTuple):
    """A draft reads this: in the first step rows of n sequences, the longest drafts first.

    ids: [N]. states: of the target, or with is_own of the head, end to end. blocks: of each sequence, with room for
    all that a chain writes. keeps_last: whether what the last step gives is wanted besides tokens.
    """

    ids: list[int]
    states: Sequence[StateRows]
    sequences: list[SequenceRows]
    blocks: list[list[int]]
    is_own: bool = False
    choice: Choice = LIKELIEST_TOKENS
    keeps_last: bool = False


class MadeDrafts(NamedTuple):
    """A draft gives this: of each sequence its tokens, and of those of a tree their parents, -1 for none.

    out: [rows, H + N], of the last step the head's own states, and the logits of the tokens that it knows; None if it
    was not wanted.
    """

    tokens: list[list[int]]
    parents: list[tuple[int, ...]] | None
    out: Tensor | None


class DraftProgramme:
    """Drafts for many sequences in one native call.

    layer: the head's layer. tables: cos and sin, [1, P, D], of the positions 0 to P - 1; None if the layer has none. A
    draft of other positions is an error of its caller. Raises UntraceableError for a part that has no native call.
    """

    def __init__(self, layer: LayerProgramme, parts: HeadParts, tables: tuple[Tensor, Tensor] | None) -> None:
        if not layer.is_one_call:
            raise UntraceableError("its layer calls a module, or keeps compressed keys")
        self.layer, self.parts = layer, parts
        self._hooks = [vars(module)[name] for module in parts.modules for name in HOOKS]
        self._calls: list[Any] = []
        self._pages: KV | None = None  # of which these are the fields
        self._page_numbers: tuple[int, ...] = ()
        self.hidden, dtype = layer.width, layer.dtype
        others = layer.source, layer.by_position, layer.of_layer, layer.leaves, layer.taken
        if layer.biased_heads or layer.own_tables is not None or any(each is not None for each in others):
            raise UntraceableError("its layer reads more than its own pages")
        if parts.embeddings.dtype is not dtype or parts.embeddings.shape[1] != self.hidden:
            raise UntraceableError("its embeddings have another dtype or size than its states")
        if not is_plain_tensor(parts.embeddings) or not parts.embeddings.is_contiguous():
            raise UntraceableError("its embeddings are not one table")
        size, pair = self.hidden, 2 * self.hidden
        narrow, fuse, words = self._linear(parts.narrow), self._linear(parts.fuse), self._linear(parts.words)
        self.tokens, self.wide = words.outputs, narrow.inputs
        sizes = (narrow.outputs, fuse.inputs, fuse.outputs, words.inputs)
        if sizes != (size, pair, size, size) or (parts.known is not None and len(parts.known) != self.tokens):
            raise UntraceableError("its parts have other sizes")
        row = size + self.tokens
        read = _Operations([LayerOp(**narrow.fields, x=Columns(0, 0, narrow.inputs), out=Columns(1, 0, size))], 0)
        fused = _Operations(
            [
                self._norm(parts.token_norm, x=Columns(0, 0, pair), out=Columns(FUSED_ROW, 0, pair)),
                self._norm(parts.state_norm, x=Columns(0, size, pair), out=Columns(FUSED_ROW, size, pair)),
                LayerOp(**fuse.fields, x=Columns(FUSED_ROW, 0, pair), out=Columns(1, 0, size)),
            ],
            pair,
        )
        said = _Operations(
            [
                self._norm(parts.last_norm, x=Columns(0, 0, size), out=Columns(1, 0, row)),
                LayerOp(**words.fields, x=Columns(1, 0, row), out=Columns(1, size, row)),
            ],
            0,
        )
        number = DTYPES[dtype]
        calls = [read.call(number), fused.call(number), layer.parts, said.call(number)]
        self._held = (read, fused, said, layer_calls(calls))
        self._reads = Reads(self._named())
        self._tensors = [read.value for read in self._named() if read.value is not None]
        self._pointers = list(map(Tensor.data_ptr, self._tensors))
        self.tables = tables

    def _norm(self, module: nn.Module, **places: Columns) -> LayerOp:
        form, weight = norm_form(module, self.layer.dtype), module._parameters.get("weight")
        if form is None or weight is None or not weight.is_contiguous() or len(weight) != self.hidden:
            raise UntraceableError("a norm of the head has no native call")
        return LayerOp(
            kind=KINDS["norm"], weight=weight.data_ptr(), weight_dtype=DTYPES[weight.dtype], heads=1, dim=self.hidden,
            eps=form.eps, offset=form.offset, round_first=form.round_first, **places,
        )  # fmt: skip

    def _linear(self, module: nn.Module) -> _Product:
        """Return the operation of a linear layer."""
        call = make_call((module,), None, UNLIMITED)
        if call is None:
            raise UntraceableError("a linear layer of the head has no native call")
        if isinstance(call, FloatLinear) and call.weights[0].dtype is not self.layer.dtype:
            raise UntraceableError("a linear layer of the head has another dtype than its states")
        self._calls.append(call)
        kind = "float_linear" if isinstance(call, FloatLinear) else "integer_linear"
        fields = {"kind": KINDS[kind], "weight": call.address(), "tile_rows": call.tile_rows}
        return _Product(fields, call.in_features, call.out_features)

    def _named(self) -> Iterator[Read]:
        """Iterate over the tensors whose addresses the operations hold, with where each of them is kept."""
        yield Read({"embeddings": self.parts.embeddings}, "embeddings", self.parts.embeddings)
        for module in self.parts.modules:
            own = module._parameters
            yield from (Read(own, name, tensor) for name, tensor in own.items())

    @property
    def tables(self) -> tuple[Tensor, Tensor] | None:
        return self._tables

    @tables.setter
    def tables(self, tables: tuple[Tensor, Tensor] | None) -> None:
        cos, sin, size = (0, 0, 0) if tables is None else (*(each.data_ptr() for each in tables), tables[0].shape[-1])
        known = 0 if self.parts.known is None else self.parts.known.data_ptr()
        self._tables, held = tables, self._held[-1]
        self._fixed = (
            ctypes.addressof(held), self.parts.embeddings.data_ptr(), known, cos, sin, self.hidden, self.tokens, size
        )  # fmt: skip

    def is_current(self) -> bool:
        """Return whether nothing has changed that the call depends on, and no hook wants to see a module."""
        return (
            not any(self._hooks)
            and self.layer.is_current()
            and self.layer.is_unobserved()
            and self._reads.hold()
            and self.is_in_place()
        )

    def is_in_place(self) -> bool:
        """Return whether all that the call reads is where it was."""
        return list(map(Tensor.data_ptr, self._tensors)) == self._pointers and self.layer.is_in_place()

    def _page_fields(self, storage: KVStorage) -> tuple[int, ...]:
        """Return the fields of pages: k_pages to v_scales, block_size, page_dtype, scale_dtype."""
        pages = storage.pages
        if pages is not self._pages:
            scales = (0, 0, DTYPES[self.layer.dtype])
            if pages.k_scales is not None and pages.v_scales is not None:
                scales = pages.k_scales.data_ptr(), pages.v_scales.data_ptr(), DTYPES[pages.k_scales.dtype]
            own = pages.k.data_ptr(), pages.v.data_ptr()
            dtypes = page_dtype(pages.k, pages.v), scales[2]
            self._page_numbers, self._pages = (*own, *scales[:2], storage.block_size, *dtypes), pages
        return self._page_numbers

    def _addresses(self, rows: DraftRows) -> tuple[array[int], list[Tensor], int]:
        """Return where the states of each row are, those that stand side by side one after the other; the tensors that
        must stay until they are read; and how many stand side by side.
        """
        found, held, dtype, pieces = array("Q"), list[Tensor](), self.layer.dtype, 1
        wide, layers = self.hidden if rows.is_own else self.wide, tuple[Tensor, ...]()
        places: list[tuple[int, int]] = []
        for each in rows.states:
            if each.layers is not layers:
                layers, places, pieces = each.layers, [], len(each.layers)
                for layer in layers:
                    if layer.dtype is not dtype or not layer.is_contiguous():
                        layer = layer.to(dtype).contiguous()
                        held.append(layer)
                    size = layer.shape[2]
                    if size * pieces != wide:
                        raise HfAccelError(f"a draft head reads states of {wide} numbers, not {pieces} times {size}")
                    places.append((layer.data_ptr(), size * dtype.itemsize))
            for row in range(each.first, each.first + each.count):
                found.extend([start + row * step for start, step in places])
        return found, held, pieces

    def __call__(self, rows: DraftRows, storage: KVStorage) -> MadeDrafts:
        """Draft. storage: of the pages that the layer writes and reads."""
        sequences, choice, blocks = rows.sequences, rows.choice, rows.blocks
        tree, draws, count, steps = choice.tree, choice.draws, len(rows.sequences), rows.sequences[0].steps
        width = 1 if tree is None else tree.width
        columns = len(blocks[0]) if count == 1 else max(map(len, blocks))
        if count > 1:
            blocks = [each + [0] * (columns - len(each)) for each in blocks]
        ids, plan = array("q", rows.ids), array("q", chain.from_iterable(sequences))
        table = array("i", chain.from_iterable(blocks))
        most = 0 if tree is None else max(each.nodes for each in sequences)
        drafted = array("q", bytes(8 * count * (most or steps)))
        addresses, _held, pieces = self._addresses(rows)
        out = None
        if rows.keeps_last:
            out = torch.empty(count * width, self.hidden + self.tokens, dtype=self.layer.dtype)
        k, v, k_scales, v_scales, block_size, page, scale = self._page_fields(storage)
        numbers, probabilities = choice.numbers, choice.probabilities
        trees, parents, counts, spare = (0, 0, 0, 0, 0), array("q"), array("q"), array("i")
        if tree is not None:
            parents, counts = array("q", bytes(8 * count * most)), array("q", bytes(8 * count))
            spare = array("i", tree.spare)
            trees = _address(spare), _address(parents), _address(counts), most, tree.num_spare
        run_draft(
            *self._fixed, _address(plan), _address(ids), _address(addresses), pieces,
            0 if out is None else out.data_ptr(), _address(drafted),
            count, steps, width, k, v, k_scales, v_scales, _address(table), columns,
            block_size, page, scale, threads(), rows.is_own,
            draws.kind, draws.temperature, draws.top_p, draws.top_k, 0 if numbers is None else _address(numbers),
            *((0, 0) if probabilities is None else (probabilities.data_ptr(), probabilities.shape[-1])), *trees,
        )  # fmt: skip
        if tree is None:
            chains = [list(drafted[i : each.steps * count : count]) for i, each in enumerate(sequences)]
            return MadeDrafts(chains, None, out)
        ends = [(i * most, i * most + number) for i, number in enumerate(counts)]
        return MadeDrafts(
            [list(drafted[start:end]) for start, end in ends], [tuple(parents[start:end]) for start, end in ends], out
        )


def _address(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


class _Product(NamedTuple):
    """The operation of a linear layer: fields of its struct, and the numbers of a row that it reads and gives."""

    fields: dict[str, Any]
    inputs: int
    outputs: int


class _Operations:
    """Operations on rows alone. width: the numbers of a row in all buffers."""

    def __init__(self, operations: Sequence[LayerOp], width: int) -> None:
        self.structs, self.starts, self.width = (LayerOp * len(operations))(*operations), (ctypes.c_int64 * 3)(), width

    def call(self, dtype: int) -> Parts:
        """Return the parts of a LayerCall."""
        operations = ctypes.addressof(self.structs), ctypes.addressof(self.starts), len(self.structs), self.width
        return pack_parts(operations=operations, tables=(0, 0, 0, 1, 0, 0), dtypes=(dtype, 0))
