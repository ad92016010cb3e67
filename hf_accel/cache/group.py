"""The tensors of K/V pages, what a forward pass reads from and writes to them, and its inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..kernels import cpu as kernels
from ..kernels import triton
from ..kernels.cpu import attention as cpu
from ..kernels.cpu.library import FLOATS
from ..kernels.layouts import KV, AttentionOptions, Ragged
from ..tensors import integers, is_recorded, packed, views
from .pool import BlockPool, BlockTable, PrefixIndex
from .quantized import INT4, SCALE_DTYPES, dequantize, dim_refusal, quantize, rotate, stored_columns


class KVStorage:
    """The K and V pages of one layer.

    keys [.., H, Dk], values [.., H, Dv]: examples of what will be written. Only their shapes, dtypes and device are
    used. quantized: a key of LARGEST_LEVELS, or None. Quantized pages have one scale per token and head, of INT4
    with a shift (see quantize); it is rounded to its stored dtype, that of K and V or what SCALE_DTYPES says, before
    it is used. A token's head with a non-finite K or V is read back as NaN.
    Raises UnsupportedError for heads that quantized pages cannot hold.
    """

    def __init__(
        self, num_blocks: int, block_size: int, keys: Tensor, values: Tensor, *, quantized: torch.dtype | None = None
    ) -> None:
        self.block_size = block_size
        self.dtype = torch.promote_types(keys.dtype, values.dtype)
        page = (num_blocks, keys.shape[-2], block_size)
        stored, device, dims = quantized or self.dtype, keys.device, (keys.shape[-1], values.shape[-1])
        columns = list(dims)
        if quantized:
            for refusal in filter(None, (dim_refusal(dim, quantized) for dim in dims)):
                raise UnsupportedError(refusal)
            columns = [stored_columns(dim, stored) for dim in dims]
        self.pages = KV(*(_empty((*page, size), dtype=stored, device=device) for size in columns))
        if quantized:
            scales, shape = SCALE_DTYPES.get(self.dtype, self.dtype), (*page, 2) if quantized is INT4 else page
            self.pages = KV(*self.pages[:2], *(_empty(shape, dtype=scales, device=device) for _ in "kv"))

    @property
    def num_blocks(self) -> int:
        return self.pages.k.shape[0]

    @property
    def nbytes(self) -> int:
        """The bytes that are reserved. The system commits memory only for blocks that were written."""
        return sum(tensor.nbytes for tensor in self.pages if tensor is not None)

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write keys [N, H, Dk] and values [N, H, Dv] to `slots` [N] int64, in place."""
        if keys.dtype is not self.dtype or values.dtype is not self.dtype:
            keys, values = keys.to(self.dtype), values.to(self.dtype)
        write_pages = self._native_write(keys)
        if write_pages is not None:
            write_pages(keys, values, self.pages, slots)
            return
        place = self._place(slots)
        self._write(self.pages.k, self.pages.k_scales, keys.detach(), place)
        self._write(self.pages.v, self.pages.v_scales, values.detach(), place)

    def _place(self, slots: Tensor) -> tuple[Tensor | slice, ...]:
        blocks = torch.div(slots, self.block_size, rounding_mode="floor")
        return blocks, slice(None), slots - blocks * self.block_size

    def _native_write(self, keys: Tensor) -> Callable[[Tensor, Tensor, KV, Tensor], None] | None:
        """The kernel that writes these tensors; None if none can. It writes the same bits as the torch code."""
        device = keys.device.type
        if is_recorded() or self.dtype not in FLOATS or self.pages.k.device.type != device:
            return None
        if triton.refusal(device) is None:
            return _write_by_triton
        return cpu.write_pages if keys.is_cpu and kernels.refusal() is None else None

    @staticmethod
    def _write(pages: Tensor, scales: Tensor | None, states: Tensor, place: tuple[Tensor | slice, ...]) -> None:
        if scales is None:
            pages[place] = states
        elif states.shape[-1]:
            pages[place], scales[place] = quantize(states, pages.dtype)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return K [..., H, Dk] and V [..., H, Dv] of `slots` [...] int64, dequantized."""
        place = self._place(slots)
        k, v, k_scales, v_scales = self.pages
        if k_scales is None or v_scales is None:
            return k[place], v[place]
        return self._read(k[place], k_scales[place]), self._read(v[place], v_scales[place])

    def _read(self, levels: Tensor, scales: Tensor) -> Tensor:
        if levels.dtype is INT4:
            return rotate(dequantize(levels, scales, torch.promote_types(self.dtype, torch.float32))).to(self.dtype)
        return dequantize(levels, scales, self.dtype)

    def widen(self, dtype: torch.dtype) -> None:
        """Change the pages to a dtype that also holds `dtype` exactly. Quantized pages stay as they are."""
        dtype = torch.promote_types(self.dtype, dtype)
        if self.pages.k_scales is None and dtype is not self.dtype:
            with torch.inference_mode(False):
                self.pages = KV(self.pages.k.to(dtype), self.pages.v.to(dtype))
            self.dtype = dtype

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, given as (source, destination)."""
        sources, destinations = torch.tensor(pairs, device=self.pages.k.device).unbind(1)
        for tensor in self.pages:
            if tensor is not None:
                tensor[destinations] = tensor[sources]

    def grow(self, num_blocks: int) -> None:
        """Grow the pages to `num_blocks` blocks. An error leaves the pages as they were."""
        larger: Any = [None if old is None else _longer(old, num_blocks) for old in self.pages]
        self.pages = KV(*larger)


def _write_by_triton(keys: Tensor, values: Tensor, pages: KV, slots: Tensor) -> None:
    # Triton is optional, and slow to import: it is imported on first use.
    from ..kernels.triton.kv_write import write_pages

    write_pages(keys, values, pages, slots)


def _empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    # torch.empty, not torch.zeros: the system then commits memory only when a page is first written.
    # Inference mode is off because a later pass may write to the pages outside of inference mode.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def _longer(old: Tensor, num_blocks: int) -> Tensor:
    new = _empty((num_blocks, *old.shape[1:]), dtype=old.dtype, device=old.device)
    new[: len(old)] = old
    return new


class PageGroup:
    """A block pool, its prefix index, and the K/V pages of the layers that share the pool.

    window: the layers' sliding window in tokens, None for full attention. index: the blocks that others may find, None
    if sequences share no prefixes. context: the ranks that share out the blocks, set before
    there are pages; None if all blocks are here. The pool and the index are those of all blocks in either case.
    rank: the numbers of compressed keys, set before there are pages (latent_pages.py); None for keys and values.
    """

    def __init__(
        self,
        *,
        window: int | None,
        num_blocks: int,
        block_size: int,
        growable: bool,
        prefix_sharing: bool,
        quantized: torch.dtype | None,
    ) -> None:
        self.window = window
        self.rank: int | None = None
        self.context: SharedContext | None = None
        self.quantized = quantized
        self.pool = BlockPool(num_blocks, block_size=block_size, growable=growable)
        self.index = PrefixIndex(self.pool) if prefix_sharing else None
        self.storages: dict[int, KVStorage] = {}
        self.has_scratch = False

    def table(self, source: Tensor | None = None) -> BlockTable:
        """Return the empty table of a new sequence. source: the output of an encoder that the sequence attends to."""
        return BlockTable(self.pool)

    # -- prefixes --------------------------------------------------------------------------------------

    def first_needed(self, num_blocks: int, block_size: int) -> int:
        """Return the number of the first block that a token behind `num_blocks` full ones needs."""
        return 0 if self.window is None else max(0, num_blocks * block_size - self.window + 1) // block_size

    def num_known(self, digests: Sequence[bytes], block_size: int) -> int:
        """Return the number of blocks of the longest beginning of `digests` behind which a sequence can go on."""
        assert self.index is not None
        length = len(digests)
        for number in reversed(range(length)):
            if number < self.first_needed(length, block_size):
                break
            if self.index.find(digests[number]) is None:
                length = number
        return length

    def adopt(self, table: BlockTable, digests: Sequence[bytes], num_tokens: int, block_size: int) -> None:
        """Start an empty table with `num_tokens` tokens of the blocks with these digests, see `num_known`."""
        assert self.index is not None
        first = self.first_needed(len(digests), block_size)
        blocks = [self.index.find(digest) for digest in digests[first:]]
        table.adopt([block for block in blocks if block is not None], num_tokens, num_dropped_blocks=first)

    def publish(self, table: BlockTable, digests: Sequence[bytes], first: int) -> list[int]:
        """Add a table's blocks from number `first` on to the index, and return those that were added.

        They may be published before the pass that writes them: in each layer, a pass writes K and V before it reads.
        """
        assert self.index is not None
        first, dropped = max(first, table.num_dropped_blocks), table.num_dropped_blocks
        return self.index.insert(digests[first:], table.blocks[first - dropped : len(digests) - dropped])

    def publish_states(self, table: BlockTable, digests: Sequence[bytes], block_size: int) -> None:
        """Add the states after the blocks with these digests to the index; keys and values have none."""

    def has_columns(self, layer_idx: int) -> bool:
        """Return whether pages of this layer hold K and V of tokens."""
        return layer_idx in self.storages

    @property
    def num_stored(self) -> int:
        """The blocks that pages have here: those of the pool, and the scratch block behind them."""
        return self._num_here(self.pool.num_blocks)

    def _num_here(self, num_blocks: int) -> int:
        return (num_blocks if self.context is None else self.context.num_own(num_blocks)) + self.has_scratch

    @property
    def scratch_slot(self) -> int:
        """A slot of the scratch block. No sequence ever reads it, so what is padding can be written there."""
        return self.pool.num_blocks * self.pool.block_size

    def add_scratch(self) -> None:
        """Give the pages a scratch block. It does not count as a block of the pool."""
        if not self.has_scratch:
            for storage in self.storages.values():
                storage.grow(storage.num_blocks + 1)
            self.has_scratch = True

    def storage(self, layer_idx: int, keys: Tensor, values: Tensor) -> KVStorage:
        """Return the pages of a layer; the first call creates them. keys [..., H, Dk], values [..., H, Dv].

        If keys or values have another dtype than the pages, the pages take the promoted dtype, as with torch.cat.
        """
        storage = self.storages.get(layer_idx)
        if storage is None:
            storage = KVStorage(self.num_stored, self.pool.block_size, keys, values, quantized=self.quantized)
            self.storages[layer_idx] = storage
        elif not (storage.dtype is keys.dtype is values.dtype):
            storage.widen(torch.promote_types(keys.dtype, values.dtype))
        return storage

    def append(self, table: BlockTable, num_tokens: int, *, each: bool = False) -> None:
        """Allocate slots for more tokens in a table. A shared last block that is partly filled is copied first.

        each: whether each of the tokens may be taken back, see BlockTable.append.

        Raises OutOfBlocksError, or torch's error if memory for the pages runs out; the table is then as it was.
        """
        # The pages grow before the pool does, so that every allocated block has pages.
        size = self._num_here(self.pool.size_for(table.blocks_needed(num_tokens, each=each)))
        for storage in self.storages.values():
            if storage.num_blocks < size:
                storage.grow(size)
        table.append(num_tokens, self.copy, each=each)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, given as (source, destination), in every layer."""
        for storage in self.storages.values() if pairs else ():
            if self.context is None:
                storage.copy(pairs)
            else:
                self.context.copy(storage.pages, pairs)

    @staticmethod
    def table_tensor(tables: Sequence[BlockTable], device: torch.device) -> Tensor:
        """Return block tables as a tensor [B, max_blocks] int32, padded with zeros."""
        width = max((len(t.blocks) for t in tables), default=0)
        padded: list[int] = []
        for table in tables:
            padded += table.blocks
            padded += [0] * (width - len(table.blocks))
        return integers(padded, dtype=torch.int32).view(len(tables), width).to(device)

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.storages.values())

    @property
    def used_bytes(self) -> float:
        """Return the bytes of the blocks in use; about those of this rank, where ranks share the blocks out."""
        return self.nbytes * self.pool.num_used / (self.pool.num_blocks + self.has_scratch)


class SharedContext(ABC):
    """The ranks among which the blocks of pages are shared out. All keep the same records of all blocks.

    rank, size: of this process, and of all.
    """

    rank: int
    size: int

    @abstractmethod
    def num_own(self, num_blocks: int) -> int:
        """The blocks that pages of a pool of `num_blocks` have here."""

    @abstractmethod
    def narrow(
        self, step: GroupStep, tables: Sequence[BlockTable], spans: Sequence[range], window: int | None
    ) -> GroupStep:
        """Return the part of a GroupStep that belongs to this rank.

        spans: the positions that the pass computes of each sequence.
        """

    @abstractmethod
    def copy(self, pages: KV, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, given as (source, destination), wherever they are."""

    @abstractmethod
    def attend(self, backend: Any, q: Tensor, pages: KV, *, step: GroupStep, options: AttentionOptions) -> Tensor:
        """Attention of q [N, Hq, D] over the blocks of all ranks -> [N, Hq, Dv]. See AttentionBackend.paged."""

    @abstractmethod
    def check_same(self, *inputs: Tensor | None) -> None:
        """Raise LostRankError unless all ranks give the same."""


@dataclass
class GroupStep:
    """The slots that the layers of one group write and read in a forward pass.

    They share a sliding window, so also blocks.

    written: [W] int64, the indices of the tokens that the pass writes, out of its N tokens; None if it writes all.
    A token whose block is shared is written only once. slots: [W] int64, where these tokens are written.
    ragged: what attention reads. Its block table and kv_len begin at the first block that the sequence still holds.
    own: the part that attention reads on this rank, where ranks share out the blocks; `slots` and `written` are then
    those of this rank.
    """

    slots: Tensor
    written: Tensor | None
    ragged: Ragged
    own: Any = None


@dataclass
class Step:
    """A forward pass over B sequences with N new tokens in all: what it writes and reads.

    num_columns: Q, the columns of the [B, Q] input. token_columns: [N] int64, the indices of the flattened [B * Q]
        input columns that hold a token; None if all columns do.
    fresh: whether no sequence had tokens before this pass, so that attention needs only the pass's own K and V.
    contiguous: for each group, whether bottom-right causal attention over a sequence's tokens gives the same result as
        attention over its columns. If not (padding on the right, or inside a sliding window), attention needs all
        columns and a mask.
    gathers: whether the cache returns K and V of all columns, as an unpatched model expects, and not its pages.
    """

    groups: list[GroupStep]
    num_columns: int
    token_columns: Tensor | None
    fresh: bool
    contiguous: list[bool]
    gathers: bool = False

    def tokens(self, states: Tensor) -> Tensor:
        """Select the N tokens of the pass from [B, H, Q, D]; returns [N, H, D]."""
        flat = states.transpose(1, 2).flatten(0, 1)
        return flat if self.token_columns is None else flat.index_select(0, self.token_columns)

    def columns(self, tokens: Tensor, batch_size: int) -> Tensor:
        """Put [N, H, D] back into [B, Q, H, D], with zeros in the padding."""
        if self.token_columns is None:
            return tokens.view(batch_size, -1, *tokens.shape[1:])
        out = tokens.new_zeros(batch_size * self.num_columns, *tokens.shape[1:])
        out.index_copy_(0, self.token_columns, tokens)
        return out.view(batch_size, self.num_columns, *tokens.shape[1:])


def offsets(lengths: list[int], device: torch.device) -> Tensor:
    """Return where each of B sequences begins if they stand end to end, and the total length: [B + 1] int32."""
    return integers([0, *accumulate(lengths)], dtype=torch.int32).to(device)


@dataclass(frozen=True)
class PassInputs:
    """The tensors of a pass over N tokens. All are on one device.

    ids, positions: [N] int64. keep: [K] int64, the indices of the tokens whose logits are wanted. step: see Step.
    """

    ids: Tensor
    positions: Tensor
    keep: Tensor
    step: Step

    @property
    def tensors(self) -> list[Tensor]:
        groups = self.step.groups
        # All groups have the same queries, so one cu_q.
        found = [self.ids, self.positions, self.keep, *(group.slots for group in groups)]
        found += [group.written for group in groups if group.written is not None]
        found += [groups[0].ragged.cu_q, *(group.ragged.kv_len for group in groups)]
        return found + [group.ragged.block_table for group in groups if group.ragged.block_table is not None]

    def with_tensors(self, tensors: Sequence[Tensor]) -> PassInputs:
        """Return the same pass with other tensors, in the order of `tensors`."""
        given, groups = iter(tensors), self.step.groups
        ids, positions, keep = next(given), next(given), next(given)
        slots = [next(given) for _ in groups]
        written = [None if group.written is None else next(given) for group in groups]
        cu_q, kv_len = next(given), [next(given) for _ in groups]
        tables = [None if group.ragged.block_table is None else next(given) for group in groups]
        moved = [
            GroupStep(
                slots[i],
                written[i],
                group.ragged._replace(cu_q=cu_q, kv_len=kv_len[i], block_table=tables[i]),
                None if group.own is None else group.own.to(ids.device),
            )
            for i, group in enumerate(groups)
        ]
        return PassInputs(ids, positions, keep, replace(self.step, groups=moved))

    def to(self, device: torch.device) -> PassInputs:
        """Return the same pass on `device`, copied there at once. The tensors are on the host before."""
        if device.type == "cpu":
            return self
        tensors = self.tensors
        return self.with_tensors(views(packed(tensors, device).to(device, non_blocking=True), tensors))
