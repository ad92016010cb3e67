"""The pages of layers that share a pool, and what a forward pass reads from and writes to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.layouts import KV, Ragged
from ..tensors import integers
from .pool import BlockPool, BlockTable, PrefixIndex
from .quantized import PageDtypes
from .step import GroupStep, SharedContext, TokenRange, offsets, written_places
from .storage import KVStorage


class PageForm:
    """The form in which pages hold the keys and values that a layer writes: as they are.

    rank: the numbers of compressed keys, from which keys and values are made; None for keys and values themselves.
    """

    rank: int | None = None

    def joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V [..., H, D] that a layer writes as the pages hold them."""
        return keys, values

    def parted(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V [..., H, D] of pages as a layer wrote them; the inverse of `joined`."""
        return keys, values

    def attended(self, pages: KV) -> KV:
        """Return a layer's pages as attention reads them."""
        return pages


AS_WRITTEN = PageForm()


class PageGroup:
    """A block pool, its prefix index, and the K/V pages of the layers that share the pool.

    window: the layers' sliding window in tokens, None for full attention. index: the blocks that others may find, None
    if sequences share no prefixes. context: the ranks that share out the blocks, set before there are pages; None if
    all blocks are here. The pool and the index are those of all blocks in either case. form: how the pages hold what
    layers write, set before there are pages. kept: the GroupFolder of the blocks
    that stay on the disk; None without any. A kind of state with other blocks, tables or steps has a class of its
    own (kinds/).
    """

    holds_tokens = True  # whether a block holds as many tokens of a sequence as it has slots
    sees_padding = False  # whether padding between tokens would change what is kept of them
    branches: bool = True  # whether branches of a drafted tree can share the tokens that they begin with
    chunk: int | None = None  # the tokens of a chunk, if a token attends to those of its chunk alone

    def __init__(
        self,
        *,
        window: int | None,
        num_blocks: int,
        block_size: int,
        growable: bool,
        prefix_sharing: bool,
        quantized: PageDtypes | None,
    ) -> None:
        self.window, self.form = window, AS_WRITTEN
        self.context: SharedContext | None = None
        self.quantized = quantized
        self.pool = BlockPool(num_blocks, block_size=block_size, growable=growable)
        self.index = PrefixIndex(self.pool) if prefix_sharing else None
        self.storages: dict[Any, KVStorage] = {}  # by layer, or by a state of one
        self.kept: Any = None
        self.has_scratch = False

    def table(self, source: Any = None) -> BlockTable:
        """Return the empty table of a new sequence. source: the kinds.SourceRows that the sequence attends to."""
        return BlockTable(self.pool)

    @property
    def rolls(self) -> bool:
        """True if a sequence of any length fits, because a block is always free before a new one is needed."""
        return self.window is not None and self.pool.num_blocks > -(-(self.window - 1) // self.pool.block_size)

    def num_blocks_of(self, num_tokens: int, source: Any) -> int:
        """Return the blocks that a sequence of so many tokens needs at most, of which one is copied for a fork.

        source: what its tokens attend to besides each other; None if there is nothing.
        """
        return -(-num_tokens // self.pool.block_size) + 1

    # -- prefixes --------------------------------------------------------------------------------------

    def first_needed(self, num_blocks: int, block_size: int) -> int:
        """Return the number of the first block that a token behind `num_blocks` full ones needs."""
        return 0 if self.window is None else max(0, num_blocks * block_size - self.window + 1) // block_size

    def num_known(self, digests: Sequence[bytes], block_size: int, *, on_disk: bool = False) -> int:
        """Return the number of blocks of the longest beginning of `digests` behind which a sequence can go on.

        on_disk: whether blocks count that are on the disk alone.
        """
        assert self.index is not None
        kept = self.kept if on_disk else None
        length = len(digests)
        for number in reversed(range(length)):
            if number < self.first_needed(length, block_size):
                break
            if self.index.find(digests[number]) is None and (kept is None or digests[number] not in kept):
                length = number
        return length

    def allocate(self, count: int) -> list[int]:
        """Return blocks with one reference that no sequence has, and with pages. Raises what `append` raises."""
        self.make_pages(count)
        return [self.pool.allocate() for _ in range(count)]

    def blocks_to_keep(self, table: BlockTable, digests: Sequence[bytes], block_size: int) -> list[tuple[bytes, int]]:
        """Return those of a table's blocks with these digests that are worth a file on the disk, (digest, block)."""
        return list(zip(digests[table.num_dropped_blocks :], table.blocks, strict=False))

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

    def storage(self, layer_idx: Any, keys: Tensor, values: Tensor) -> KVStorage:
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
        self.make_pages(table.blocks_needed(num_tokens, each=each))
        table.append(num_tokens, self.copy, each=each)

    def make_pages(self, num_blocks: int) -> None:
        """Make the pages for so many more blocks, before the pool grows: so every allocated block has pages."""
        size = self._num_here(self.pool.size_for(num_blocks))
        for storage in self.storages.values():
            if storage.num_blocks < size:
                storage.grow(size)

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

    # -- a pass ----------------------------------------------------------------------------------------

    def step(
        self, ranges: Sequence[TokenRange], tables: Sequence[BlockTable], *,
        runs: Sequence[list[tuple[int, int]]], cu_q: Tensor,
    ) -> GroupStep:  # fmt: skip
        """Make the part of a Step for this group. Attention does not read a sequence's slots beyond its range.

        tables: of this group, of the sequence of each range. runs: the runs of each range, see TokenRange.runs. cu_q:
        where the queries of each run begin, and their number: [R + 1] int32.
        """
        slots: list[int] = []
        held: list[int] = []
        attending: list[list[int]] = []
        counts: list[int] = []
        size, device, is_copied = self.pool.block_size, cu_q.device, False
        for each, table, queries in zip(ranges, tables, runs, strict=True):
            is_copied = is_copied or bool(each.copied)
            slots += table.slots(each.first_written, each.start + each.count)
            dropped = table.num_dropped_blocks * size
            for count, first, stop in self.attended(each, dropped, queries):
                counts.append(count)
                held.append(stop - first)
                attending.append(table.blocks[(first - dropped) // size :])
        written = None
        if len(slots) < sum(each.count for each in ranges) or is_copied:
            written = integers(written_places(ranges)).to(device)
        ragged = Ragged(
            cu_q if self.chunk is None else offsets(counts, device),
            kv_len=integers(held, dtype=torch.int32).to(device),
            max_q=max(counts, default=0),
            max_kv=max(held, default=0),
            block_table=self.table_tensor(attending, device),
        )
        step = GroupStep(integers(slots).to(device), written, ragged)
        if self.context is None:
            return step
        return self.context.narrow(step, tables, [each.span for each in ranges], self.window)

    def attended(
        self, each: TokenRange, dropped: int, queries: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int, int]]:
        """Return what the queries of a range attend to: (queries, the first token, the end of the tokens).

        dropped: the tokens that the sequence no longer holds. queries: the runs of the range.
        """
        return [(count, dropped, stop) for count, stop in queries]
