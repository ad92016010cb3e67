"""The weight that makes keys and values of compressed ones, where it multiplies queries and results instead
(DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import cpu
from ..kernels.cpu.head_products import head_products, reference
from ..kernels.cpu.library import native
from ..kernels.layouts import Ragged


@dataclass(frozen=True)
class Expansion:
    """The weight of the linear layer that makes keys and values of latents.

    weight: [H, D + Dv, rank], the rows of a head's keys before those of its values. scales: float32 [H, D + Dv] of
    int8; None for floats. size: D.
    """

    weight: Tensor
    scales: Tensor | None
    size: int

    @staticmethod
    def of(module: Any, weight: Tensor, scales: Tensor | None = None) -> Expansion:
        """weight: [H * (D + Dv), rank]; scales: [H * (D + Dv)]."""
        size, rows = module.qk_nope_head_dim, module.qk_nope_head_dim + module.v_head_dim
        heads = None if scales is None else scales.view(-1, rows)
        return Expansion(weight.view(-1, rows, module.kv_lora_rank), heads, size)

    def takes_more(self, ragged: Ragged, rotated: int) -> bool:
        """Return whether attention to latents takes more operations than to keys and values that are made for it.

        rotated: the numbers of a rotated part.
        """
        _, rows, rank = self.weight.shape
        queries, keys = ragged.cu_q.diff().double(), ragged.kv_len.double()
        pairs = float((queries * (keys - (queries - 1) / 2)).sum())
        absorbed = pairs * (2 * rank + rotated) + float(queries.sum()) * rank * rows
        return absorbed > pairs * (rows + rotated) + float(keys.sum()) * rank * rows

    def queries(self, q: Tensor) -> Tensor:
        """Turn queries for keys, [N, H, D + Dr], into queries for latents and rotated parts, [N, H, rank + Dr]."""
        plain, rotated = q[..., : self.size], q[..., self.size :]
        weight, scales = self.part(slice(None, self.size))
        if not _is_native(q, weight):
            return torch.cat([reference(plain, weight, scales=scales, transposed=True), rotated], dim=-1)
        rank = weight.shape[2]
        out = q.new_empty(*q.shape[:2], rank + rotated.shape[2])
        head_products(plain, weight, out=out[..., :rank], scales=scales, transposed=True)
        out[..., rank:] = rotated
        return out

    def results(self, x: Tensor) -> Tensor:
        """Turn sums of latents [N, H, rank] into sums of values [N, H, Dv]."""
        weight, scales = self.part(slice(self.size, None))
        if not _is_native(x, weight):
            return reference(x, weight, scales=scales)
        out = x.new_empty(*x.shape[:2], weight.shape[1])
        head_products(x, weight, out=out, scales=scales)
        return out

    def part(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return these rows of each head."""
        return self.weight[:, rows], None if self.scales is None else self.scales[:, rows]


def _is_native(x: Tensor, weight: Tensor) -> bool:
    return native(x) and weight.is_cpu and cpu.refusal() is None


class KnownExpansion(ABC):
    """Knows the weight by which a module makes keys and values."""

    @abstractmethod
    def expansion(self, module: Any, dtype: torch.dtype) -> Expansion | None:
        """Return the weight for queries and results of `dtype`; None if the module makes keys by more than that."""

    @abstractmethod
    def most_rows(self, module: Any) -> int:
        """Return the most tokens of a sequence that are computed so whatever takes fewer operations."""
