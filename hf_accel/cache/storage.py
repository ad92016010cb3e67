"""The tensors of the pages of one layer: keys and values of blocks, written and read by slots."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..kernels import cpu as kernels
from ..kernels import triton
from ..kernels.cpu import attention as cpu
from ..kernels.cpu.library import FLOATS
from ..kernels.layouts import KV
from ..tensors import is_recorded
from .quantized import INT4, SCALE_DTYPES, PageDtypes, dequantize, dims_refusal, quantize, rotate, stored_columns


class KVStorage:
    """The K and V pages of one layer.

    keys [.., H, Dk], values [.., H, Dv]: examples of what will be written. Only their shapes, dtypes and device are
    used. quantized: the dtypes of pages with scales, or None. Quantized pages have one scale per token and head,
    of INT4 with a shift (see quantize); it is rounded to its stored dtype, that of K and V or what SCALE_DTYPES says,
    before it is used. A token's head with a non-finite K or V is read back as NaN.
    Raises UnsupportedError for heads that quantized pages cannot hold.
    """

    def __init__(
        self, num_blocks: int, block_size: int, keys: Tensor, values: Tensor, *, quantized: PageDtypes | None = None
    ) -> None:
        self.block_size = block_size
        self.dtype = torch.promote_types(keys.dtype, values.dtype)
        page = (num_blocks, keys.shape[-2], block_size)
        device, dims = keys.device, (keys.shape[-1], values.shape[-1])
        self.sizes = (keys.shape[-2], *dims)  # heads, and the numbers of a key and of a value
        if quantized is None:
            self.pages = KV(*(_empty((*page, size), dtype=self.dtype, device=device) for size in dims))
            return
        refusal = dims_refusal(*dims, quantized)
        if refusal is not None:
            raise UnsupportedError(refusal)
        sizes: list[Any] = [
            ((*page, stored_columns(dim, stored)), stored) for dim, stored in zip(dims, quantized, strict=True)
        ]
        scales = SCALE_DTYPES.get(self.dtype, self.dtype)
        sizes += [((*page, 2) if stored is INT4 else page, scales) for stored in quantized]
        self.pages = KV(*(_empty(shape, dtype=stored, device=device) for shape, stored in sizes))

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
            return _write_by_triton if self.pages.k.dtype is self.pages.v.dtype else None
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
        tensors = [tensor for tensor in self.pages if tensor is not None and tensor.numel()]  # compressed keys: no V
        if self.pages.k.is_cpu and all(tensor.is_contiguous() for tensor in tensors):
            for tensor in tensors:  # of a fork a few blocks in each layer, which takes less than a call of torch
                size, start = tensor.stride(0) * tensor.itemsize, tensor.data_ptr()
                for source, destination in pairs:
                    ctypes.memmove(start + destination * size, start + source * size, size)
            return
        sources, destinations = torch.tensor(pairs, device=self.pages.k.device).unbind(1)
        for tensor in tensors:
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
