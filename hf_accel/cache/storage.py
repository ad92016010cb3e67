"""The tensors behind the blocks of one layer, in the model's dtype, in INT8 or in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import cpu as kernels
from ..kernels.cpu.attention import write_pages
from ..kernels.cpu.library import FLOATS
from ..layouts import KV
from ..tensors import is_recorded

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
