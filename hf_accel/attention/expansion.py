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
from ..kernels.cpu.head_products import OF_OUTPUTS, head_products, reference
from ..kernels.cpu.library import native
from ..kernels.layouts import Ragged


@dataclass(frozen=True)
class Expansion:
    """The weight of the linear layer that makes keys and values of latents.

    keys: [H, D, rank], the rows of each head's keys. values: [H, Dv, rank], those of its values; [H, rank, Dv] if they
    are `transposed`, in which form few tokens take less time. key_scales, value_scales: float32 [H, D] and [H, Dv], of
    int8; None for floats.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    transposed: bool = False

    @staticmethod
    def of(module: Any, weight: Tensor, scales: Tensor | None = None, *, transposed: bool = False) -> Expansion:
        """weight: [H * (D + Dv), rank]; scales: [H * (D + Dv)]. transposed: whether to copy the weight."""
        size, rows = module.qk_nope_head_dim, module.qk_nope_head_dim + module.v_head_dim
        heads = weight.view(-1, rows, module.kv_lora_rank)
        keys, values = heads[:, :size], heads[:, size:]
        if transposed:
            keys, values = keys.contiguous(), values.transpose(1, 2).contiguous()
        if scales is None:
            return Expansion(keys, values, transposed=transposed)
        own = scales.view(-1, rows)
        return Expansion(keys, values, own[:, :size].contiguous(), own[:, size:].contiguous(), transposed)

    def takes_more(self, ragged: Ragged, rotated: int) -> bool:
        """Return whether attention to latents takes more operations than to keys and values that are made for it.

        rotated: the numbers of a rotated part.
        """
        rank, rows = self.keys.shape[2], self.keys.shape[1] + self.values.shape[2 if self.transposed else 1]
        queries, keys = ragged.cu_q.diff().double(), ragged.kv_len.double()
        pairs = float((queries * (keys - (queries - 1) / 2)).sum())
        absorbed = pairs * (2 * rank + rotated) + float(queries.sum()) * rank * rows
        return absorbed > pairs * (rows + rotated) + float(keys.sum()) * rank * rows

    def queries(self, q: Tensor) -> Tensor:
        """Turn queries for keys, [N, H, D + Dr], into queries for latents and rotated parts, [N, H, rank + Dr]."""
        size, rank = self.keys.shape[1:]
        plain, rotated = q[..., :size], q[..., size:]
        if not _is_native(q, self.keys):
            made = reference(plain, self.keys, scales=self.key_scales, transposed=True)
            return torch.cat([made, rotated], dim=-1)
        out = q.new_empty(*q.shape[:2], rank + rotated.shape[2])
        head_products(plain, self.keys, out=out[..., :rank], scales=self.key_scales, transposed=True)
        out[..., rank:] = rotated
        return out

    def results(self, x: Tensor) -> Tensor:
        """Turn sums of latents [N, H, rank] into sums of values [N, H, Dv]."""
        how = OF_OUTPUTS if self.transposed else False
        if not _is_native(x, self.values):
            return reference(x, self.values, scales=self.value_scales, transposed=how)
        out = x.new_empty(*x.shape[:2], self.values.shape[2 if self.transposed else 1])
        head_products(x, self.values, out=out, scales=self.value_scales, transposed=how)
        return out


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
