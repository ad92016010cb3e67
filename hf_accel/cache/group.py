"""The pages of layers that share a pool, what a forward pass reads from and writes to them, and its inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..kernels.layouts import KV, AttentionOptions, Ragged
from ..tensors import integers, packed, views
from .pool import BlockPool, BlockTable, PrefixIndex
from .storage import KVStorage


class PageGroup:
    """A block pool, its prefix index, and the K/V pages of the layers that share the pool.

    window: the layers' sliding window in tokens, None for full attention. index: the blocks that others may find, None
    if sequences share no prefixes. context: the ranks that share out the blocks, set before
    there are pages; None if all blocks are here. The pool and the index are those of all blocks in either case.
    rank: the numbers of compressed keys, set before there are pages (latent_pages.py); None for keys and values.
    chunk: the tokens of a chunk, if a token attends to those of its chunk alone: the window, and whole blocks.
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
        self.chunk: int | None = None
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
    def table_tensor(tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """Return the blocks of tables as a tensor [B, max_blocks] int32, padded with zeros."""
        width = max(map(len, tables), default=0)
        padded: list[int] = []
        for blocks in tables:
            padded += blocks
            padded += [0] * (width - len(blocks))
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
