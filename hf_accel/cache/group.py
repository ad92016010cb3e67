"""The pages of the layers that share a pool of blocks: their tensors, and what a pass reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import cpu as kernels
from ..kernels.cpu.attention import write_pages
from ..kernels.cpu.library import FLOATS
from ..layouts import KV, Ragged
from ..tensors import is_recorded
from .pool import BlockPool, PrefixIndex
from .table import BlockTable

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # level of each dtype that quantized pages may have


class KVStorage:
    """K and V pages of one layer.

    keys [.., H, Dk], values [.., H, Dv]: states as they will come; only their shapes, dtypes and device count.
    quantized: a dtype of LARGEST for the pages, with a scale per token and head (symmetric absmax, rounded to `dtype`
    before it is used). Non-finite K or V make that token's head NaN.
    """

    def __init__(
        self, num_blocks: int, block_size: int, keys: Tensor, values: Tensor, *, quantized: torch.dtype | None = None
    ) -> None:
        self.block_size = block_size
        self.dtype = torch.promote_types(keys.dtype, values.dtype)
        page = (num_blocks, keys.shape[-2], block_size)
        stored, device = quantized or self.dtype, keys.device
        self.pages = KV(*(_empty((*page, x.shape[-1]), dtype=stored, device=device) for x in (keys, values)))
        if quantized:
            self.pages = KV(*self.pages[:2], *(_empty(page, dtype=self.dtype, device=device) for _ in "kv"))

    @property
    def num_blocks(self) -> int:
        return self.pages.k.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes reserved; what is committed depends on the blocks that were written."""
        return sum(tensor.nbytes for tensor in self.pages if tensor is not None)

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """keys [N, H, Dk] and values [N, H, Dv] into slots [N] int64, in place."""
        if keys.dtype is not self.dtype or values.dtype is not self.dtype:
            keys, values = keys.to(self.dtype), values.to(self.dtype)
        if self._is_native(keys, values):
            write_pages(keys, values, self.pages, slots)
            return
        place = self._place(slots)
        self._write(self.pages.k, self.pages.k_scales, keys.detach(), place)
        self._write(self.pages.v, self.pages.v_scales, values.detach(), place)

    def _place(self, slots: Tensor) -> tuple[Tensor | slice, ...]:
        blocks = torch.div(slots, self.block_size, rounding_mode="floor")
        return blocks, slice(None), slots - blocks * self.block_size

    def _is_native(self, keys: Tensor, values: Tensor) -> bool:
        """Whether the kernel can write this; it gives the bits of the torch path below."""
        return (
            self.dtype in FLOATS
            and keys.is_cpu
            and self.pages.k.is_cpu
            and not is_recorded()
            and kernels.refusal() is None
        )

    @staticmethod
    def _write(pages: Tensor, scales: Tensor | None, states: Tensor, place: tuple[Tensor | slice, ...]) -> None:
        if scales is None:
            pages[place] = states
        else:
            pages[place], scales[place] = quantize(states, pages.dtype)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of slots [...], dequantized: [..., H, Dk] and [..., H, Dv]."""
        place = self._place(slots)
        k, v, k_scales, v_scales = self.pages
        if k_scales is None or v_scales is None:
            return k[place], v[place]
        scales = k_scales[place].unsqueeze(-1), v_scales[place].unsqueeze(-1)
        return k[place].to(self.dtype) * scales[0], v[place].to(self.dtype) * scales[1]

    def widen(self, dtype: torch.dtype) -> None:
        """Hold numbers of `dtype` too; what is stored keeps its value. Quantized pages stay as they are."""
        dtype = torch.promote_types(self.dtype, dtype)
        if self.pages.k_scales is None and dtype is not self.dtype:
            with torch.inference_mode(False):
                self.pages = KV(self.pages.k.to(dtype), self.pages.v.to(dtype))
            self.dtype = dtype

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination)."""
        sources, destinations = torch.tensor(pairs, device=self.pages.k.device).unbind(1)
        for tensor in self.pages:
            if tensor is not None:
                tensor[destinations] = tensor[sources]

    def grow(self, num_blocks: int) -> None:
        """Make room for more blocks; a pool doubles, so that this is rare. Raises with the pages as they were."""
        larger: Any = [None if old is None else _longer(old, num_blocks) for old in self.pages]
        self.pages = KV(*larger)


def _empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    # empty, not zeros: the system commits memory when a page is first written. Not an inference tensor, even if
    # the first pass runs in inference mode: a later pass may write outside it.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def _longer(old: Tensor, num_blocks: int) -> Tensor:
    new = _empty((num_blocks, *old.shape[1:]), dtype=old.dtype, device=old.device)
    new[: len(old)] = old
    return new


def quantize(states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[N, H, D] to [N, H, D] of `dtype` (of LARGEST) and scales [N, H] in that of `states`; zeros have scale 0."""
    largest = LARGEST[dtype]
    scales = (states.abs().amax(-1).float() / largest).to(states.dtype)
    divisors = scales.float().masked_fill(scales == 0, 1).unsqueeze(-1)
    levels = states.float() / divisors
    levels = levels.round() if dtype == torch.int8 else levels
    return levels.clamp(-largest, largest).nan_to_num(0).to(dtype), scales


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


@dataclass
class GroupStep:
    """One forward pass as the layers of one group (same sliding window, so same blocks) see it.

    slots: [number written] int64. written: int64 [number written], which of the N tokens are stored (a token of a
    block that others share is stored once); None: all. ragged: what they read; its block table and kv_len begin at the
    first block that is still held.
    """

    slots: Tensor
    written: Tensor | None
    ragged: Ragged


@dataclass
class Step:
    """One forward pass over B sequences with N new tokens in all.

    token_columns: LongTensor [N], which of the flattened [B * Q] input columns hold a token; None when all do.
    fresh: no sequence has a past, so K and V of this pass are all there is.
    contiguous: per group, whether bottom-right causal attention over a sequence's tokens is attention over its
        columns. Otherwise (padding on the right, or inside a sliding window) attention takes columns and a mask.
    gathers: the cache hands all columns to attention, as in an unpatched model, instead of its pages.
    """

    groups: list[GroupStep]
    num_columns: int
    token_columns: Tensor | None
    fresh: bool
    contiguous: list[bool]
    gathers: bool = False

    def tokens(self, states: Tensor) -> Tensor:
        """[B, H, Q, D] to the N tokens of the pass, [N, H, D]."""
        flat = states.transpose(1, 2).flatten(0, 1)
        return flat if self.token_columns is None else flat.index_select(0, self.token_columns)

    def columns(self, tokens: Tensor, batch_size: int) -> Tensor:
        """[N, H, D] back to [B, Q, H, D], zero in the padding."""
        if self.token_columns is None:
            return tokens.view(batch_size, -1, *tokens.shape[1:])
        out = tokens.new_zeros(batch_size * self.num_columns, *tokens.shape[1:])
        out.index_copy_(0, self.token_columns, tokens)
        return out.view(batch_size, self.num_columns, *tokens.shape[1:])


def offsets(lengths: list[int], device: torch.device) -> Tensor:
    """Lengths of B sequences as [B + 1] int32 starting points."""
    total, starts = 0, [0]
    for length in lengths:
        total += length
        starts.append(total)
    return torch.tensor(starts, dtype=torch.int32, device=device)
