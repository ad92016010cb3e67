"""Layers that free the same blocks (all full-attention layers, or all with one window) share a pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .pool import BlockPool
from .prefix import PrefixIndex
from .storage import KVStorage
from .table import BlockTable


class PageGroup:
    """A block pool, its prefix index, and the K/V pages of each of its layers.

    window: the layers' sliding window in tokens, None for full attention. Only full-attention groups keep a
    prefix index: blocks behind a window are gone when the prompt comes again.
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
        self.quantized = quantized
        self.pool = BlockPool(num_blocks, block_size=block_size, growable=growable)
        self.index = PrefixIndex(self.pool) if prefix_sharing and window is None else None
        self.storages: dict[int, KVStorage] = {}

    def storage(self, layer_idx: int, keys: Tensor, values: Tensor) -> KVStorage:
        """The pages of a layer, made at its first write. keys: [..., H, Dk].

        They hold what comes in another dtype as well as torch.cat would: exactly.
        """
        storage = self.storages.get(layer_idx)
        if storage is None:
            storage = KVStorage(self.pool.num_blocks, self.pool.block_size, keys, values, quantized=self.quantized)
            self.storages[layer_idx] = storage
        elif not (storage.dtype is keys.dtype is values.dtype):
            storage.widen(torch.promote_types(keys.dtype, values.dtype))
        return storage

    def append(self, table: BlockTable, num_tokens: int) -> None:
        """Room for more tokens in a table, the last block copied first if others read it.

        The pages grow before the pool does, so that no block is ever given out that has none. Raises OutOfBlocksError,
        or what the memory for pages and copies met, with the table as it was.
        """
        size = self.pool.size_for(table.blocks_needed(num_tokens))
        for storage in self.storages.values():
            if storage.num_blocks < size:
                storage.grow(size)
        table.append(num_tokens, self.copy)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer."""
        if pairs:
            for storage in self.storages.values():
                storage.copy(pairs)

    @staticmethod
    def table_tensor(tables: Sequence[BlockTable], device: torch.device) -> Tensor:
        """Block tables as [B, max_blocks] int32, zero beyond a row's end."""
        width = max((len(t.blocks) for t in tables), default=0)
        padded = [t.blocks + [0] * (width - len(t.blocks)) for t in tables]
        return torch.tensor(padded, dtype=torch.int32, device=device).view(len(tables), width)

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.storages.values())
