"""Attention over compressed keys: multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

A layer keeps a few numbers of a token, the latent, from which a linear layer makes the keys and values of all heads,
and the rotated part of the keys, which all heads share. Pages hold these alone. The part of the linear layer that
makes keys multiplies the queries instead, and the part that makes values the results: so attention reads the latents
themselves, as one head of keys, and as values a part of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import cpu
from ...kernels.cpu.head_products import head_products, reference
from ...kernels.cpu.library import native
from ...kernels.layouts import KV, Ragged
from ...recognition.cache_code import EXPANDS
from ...recognition.code import code_of
from ...recognition.trial import RandomNumbers, Tolerance, agree, unwatched_twin
from ...undo.journal import original_class

EXPANSION = "kv_b_proj"  # the linear layer that makes keys and values
# The numbers of a latent, of a head's keys that come from it, of those that are rotated, and of a head's values.
SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


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
        weight, scales = self._part(slice(None, self.size))
        if not _is_native(q, weight):
            return torch.cat([reference(plain, weight, scales=scales, transposed=True), rotated], dim=-1)
        rank = weight.shape[2]
        out = q.new_empty(*q.shape[:2], rank + rotated.shape[2])
        head_products(plain, weight, out=out[..., :rank], scales=scales, transposed=True)
        out[..., rank:] = rotated
        return out

    def results(self, x: Tensor) -> Tensor:
        """Turn sums of latents [N, H, rank] into sums of values [N, H, Dv]."""
        weight, scales = self._part(slice(self.size, None))
        if not _is_native(x, weight):
            return reference(x, weight, scales=scales)
        out = x.new_empty(*x.shape[:2], weight.shape[1])
        head_products(x, weight, out=out, scales=scales)
        return out

    def _part(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        return self.weight[:, rows], None if self.scales is None else self.scales[:, rows]


def _is_native(x: Tensor, weight: Tensor) -> bool:
    return native(x) and weight.is_cpu and cpu.refusal() is None


def expanded(module: Any, kv: tuple[Tensor, Tensor]) -> KV:
    """Return K and V [M, H, D] of latents [1, 1, M, rank] and rotated parts, made by the module's own code."""
    keys, values = module.expand_kv(*kv)
    return KV(keys[0].transpose(0, 1), values[0].transpose(0, 1))


def is_known_expansion(module: nn.Module) -> bool:
    """Return whether a module makes K and V of compressed keys as we do, by its code and on random input."""
    sizes = [getattr(module, name, None) for name in SIZES]
    if not code_of(module).expands or EXPANDS in vars(module) or not all(isinstance(s, int) and s > 0 for s in sizes):
        return False
    return isinstance(module._modules.get(EXPANSION), nn.Module) and _agrees(module)


@torch.no_grad()
def _agrees(module: nn.Module) -> bool:
    numbers, heads, rank, key, rotated, value = RandomNumbers(), 3, 6, 4, 2, 5
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, rank, heads * (key + value), bias=False, device="cpu")
    linear.weight.copy_(numbers(*linear.weight.shape))
    twin = unwatched_twin(module, _modules={EXPANSION: linear})
    twin.kv_lora_rank, twin.qk_nope_head_dim, twin.qk_rope_head_dim, twin.v_head_dim = rank, key, rotated, value
    latents, parts = numbers(2, 1, 7, rank), numbers(2, 1, 7, rotated)
    made = torch.einsum("bitr,hdr->bhtd", latents, linear.weight.view(heads, key + value, rank))
    ours = torch.cat([made[..., :key], parts.expand(-1, heads, -1, -1)], dim=-1), made[..., key:]
    return agree(
        lambda: original_class(module).expand_kv(twin, latents, parts), lambda: ours, Tolerance(absolute=1e-5)
    )
