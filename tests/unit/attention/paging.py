"""Sequences laid out in pages as a cache would, with NaN wherever nothing was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_accel.attention import AttentionBackend
from hf_accel.cache.quantized import INT4, PageDtypes, dequantize, rotate
from hf_accel.cache.quantized import quantize as stored
from hf_accel.kernels.layouts import KV, AttentionOptions, Ragged

from ...devices import device_of
from .oracle import oracle

SCALE = 0.3
GARBAGE = 2**30  # a block that does not exist


@dataclass
class Case:
    """Ragged queries q[b] [Hq, Q, D] over keys k[b] [Hkv, T, D] and values v[b], and the same in pages."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    window: int | None = None

    def run(self, backend: AttentionBackend, *, return_lse: bool = False, **options: Any) -> Any:
        """On the backend's device, from and to the CPU."""
        device = device_of(backend)
        result = backend.paged(*self.operands(device, **options), return_lse=return_lse)
        return tuple(x.cpu() for x in result) if return_lse else result.cpu()

    def operands(self, device: str = "cpu", **options: Any) -> tuple[Tensor, KV, Ragged, AttentionOptions]:
        q_len, kv_len = ([x.shape[1] for x in xs] for xs in (self.q, self.k))
        ragged = Ragged(
            torch.tensor([0, *q_len]).cumsum(0).int().to(device),
            torch.tensor(kv_len, dtype=torch.int32, device=device),
            max(q_len, default=0),
            max(kv_len, default=0),
            self.block_table.to(device),
        )
        pages = (self.k_pages, self.v_pages, self.k_scales, self.v_scales)
        queries = torch.cat([x.transpose(0, 1) for x in self.q] or [torch.empty(0, 4, 8)])
        given = {name: on(x, device) for name, x in options.items()}
        return (
            queries.to(device),
            KV(*(on(x, device) for x in pages)),
            ragged,
            AttentionOptions(**{"scale": SCALE, "window": self.window, **given}),
        )

    def expected(self, masks: Sequence[Tensor | None] = (), **options: Any) -> tuple[Tensor, Tensor]:
        """Output [N, Hq, Dv] and lse [N, Hq] of the oracle. masks: of each sequence, [Hq, Q, T]."""
        options = {"scale": SCALE, "window": self.window, **options}
        parts = [
            oracle(q[None], k[None], v[None], mask=mask, **options)
            for q, k, v, mask in zip(self.q, self.k, self.v, masks or [None] * len(self.q), strict=True)
        ]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts])

    def quantized(self, dtype: torch.dtype | PageDtypes = torch.int8) -> Case:
        """int8, fp8 or int4 pages with a scale per token and head; k and v become what they decode to."""
        keys, values = dtype if isinstance(dtype, PageDtypes) else (dtype, dtype)
        k_pages, k_scales = quantize(self.k_pages, keys)
        v_pages, v_scales = quantize(self.v_pages, values)
        k_scales = k_scales.to(v_scales.dtype)  # as those of int4 have it, which both have in a cache
        k, v = [decoded(x, keys) for x in self.k], [decoded(x, values) for x in self.v]
        return replace(self, k=k, v=v, k_pages=k_pages, v_pages=v_pages, k_scales=k_scales, v_scales=v_scales)


def on(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """NaN stays as noise with a NaN scale."""
    if dtype is INT4:
        return stored(x, dtype)
    scales = x.abs().amax(-1) / (127 if dtype == torch.int8 else 448)
    levels = torch.where(x.isnan(), 99.0, (x / scales.unsqueeze(-1)).float())
    return (levels.round() if dtype == torch.int8 else levels).to(dtype), scales


def decoded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In float64, for the product of a level and its scale need not be a number of x's dtype."""
    if not x.numel():
        return x.double()
    values, scales = quantize(x, dtype)
    if dtype is INT4:
        return rotate(dequantize(values, scales.double(), torch.float64))
    return values.double() * scales.double().unsqueeze(-1)


def make_case(
    lengths: list[tuple[int, int]],
    *,
    block_size: int = 4,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    spare_columns: int = 2,
    spare_blocks: int = 3,
    seed: int = 0,
) -> Case:
    """lengths: (queries, keys) per sequence. Blocks are shuffled; those behind the window were given back."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    q = [random(heads[0], n, dims[0]) for n, _ in lengths]
    k, v = ([random(heads[1], n, dim) for _, n in lengths] for dim in dims)
    blocks_of = [-(-n // block_size) for _, n in lengths]
    free = torch.randperm(sum(blocks_of) + spare_blocks, generator=generator).tolist()
    k_pages, v_pages = (torch.full((len(free), heads[1], block_size, dim), float("nan"), dtype=dtype) for dim in dims)
    table = torch.full((len(lengths), max(blocks_of, default=0) + spare_columns), GARBAGE, dtype=torch.int32)
    for row, (num_queries, num_keys) in enumerate(lengths):
        oldest = 0 if window is None else max(num_keys - num_queries - window + 1, 0)
        for block in range(oldest // block_size, blocks_of[row] if num_queries else 0):
            table[row, block] = free.pop()
            tokens = slice(block * block_size, (block + 1) * block_size)
            used = k[row][:, tokens].shape[1]
            k_pages[table[row, block], :, :used] = k[row][:, tokens]
            v_pages[table[row, block], :, :used] = v[row][:, tokens]
    return Case(q, k, v, k_pages, v_pages, table, window=window)
