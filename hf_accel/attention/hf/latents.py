"""Attention over compressed keys: multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

A layer keeps a few numbers of a token, the latent, from which a linear layer makes the keys and values of all heads,
and the rotated part of the keys, which all heads share. Pages hold these alone. Where the linear layer is plain, its
part for the keys multiplies the queries, and its part for the values the results: so attention reads the latents
themselves, as one head of keys, and as values a part of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...cache.hf import PAGED_HANDLE, PagedKV
from ...errors import UnsupportedError
from ...kernels.layouts import KV
from ...recognition.code import EXPANDS, code_of
from ...recognition.trial import RandomNumbers, Tolerance, agree, unwatched_twin
from ...recognition.unchanged import is_unobserved
from ...undo.journal import Mixin, original_class

EXPANSION = "kv_b_proj"  # the linear layer that makes keys and values
# The numbers of a latent, of a head's keys that come from it, of those that are rotated, and of a head's values.
SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class PagedLatents(Mixin):
    """A mixin for attention over compressed keys, which hands them on as they are where pages hold them."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, T, D] of latents [B, 1, T, rank] and rotated parts [B, 1, T, Dr].

        Where pages hold them, both are returned as they are. Raises UnsupportedError if the pages are for others.
        """
        paged: PagedKV | None = getattr(kv_nope, PAGED_HANDLE, None)
        own: Any = self
        if paged is None:
            expanded: tuple[Tensor, Tensor] = super().expand_kv(kv_nope, k_rot)  # type: ignore[misc]
            return expanded
        if paged.rank != own.kv_lora_rank:
            raise UnsupportedError(
                f"the pages are for compressed keys of {paged.rank} numbers, and layer {own.layer_idx} has "
                f"{own.kv_lora_rank}; make the cache with hf_accel.PagedCache(model.config)"
            )
        return kv_nope, k_rot


class Expansion(NamedTuple):
    """The parts of the linear layer that makes keys and values of latents: keys [H, D, rank], values [H, Dv, rank]."""

    keys: Tensor
    values: Tensor

    @staticmethod
    def of(module: Any, dtype: torch.dtype) -> Expansion | None:
        """Return the parts for queries of `dtype`; None if the layer is not a plain one with a weight of that dtype."""
        linear = module._modules.get(EXPANSION)
        if original_class(linear) is not nn.Linear or not is_unobserved(linear):
            return None
        weight, bias = (linear._parameters.get(name) for name in ("weight", "bias"))
        if weight is None or bias is not None or weight.dtype is not dtype:
            return None
        heads = weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)
        return Expansion(heads[:, : module.qk_nope_head_dim], heads[:, module.qk_nope_head_dim :])

    def queries(self, q: Tensor) -> Tensor:
        """Turn queries for keys, [N, H, D + Dr], into queries for latents and rotated parts, [N, H, rank + Dr]."""
        size = self.keys.shape[1]
        absorbed = torch.matmul(q[..., :size].transpose(0, 1), self.keys).transpose(0, 1)
        return torch.cat([absorbed, q[..., size:]], dim=-1)

    def results(self, out: Tensor) -> Tensor:
        """Turn sums of latents [N, H, rank] into sums of values [N, H, Dv]."""
        return torch.matmul(out.transpose(0, 1), self.values.transpose(1, 2)).transpose(0, 1)


def expanded(module: Any, kv: tuple[Tensor, Tensor]) -> KV:
    """Return K and V [M, H, D] of latents [1, 1, M, rank] and rotated parts, made by the module's own code."""
    keys, values = module.expand_kv(*kv)
    return KV(keys[0].transpose(0, 1), values[0].transpose(0, 1))


def is_known_expansion(module: nn.Module) -> bool:
    """Return whether a module makes K and V of compressed keys as we do, by its code and on random input."""
    sizes = [getattr(module, name, None) for name in SIZES]
    if not code_of(module).expands or EXPANDS in vars(module) or not all(isinstance(s, int) and s > 0 for s in sizes):
        return False
    return EXPANSION in module._modules and _agrees(module)


@torch.no_grad()
def _agrees(module: nn.Module) -> bool:
    numbers, heads, rank, key, rotated, value = RandomNumbers(), 3, 6, 4, 2, 5
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, rank, heads * (key + value), bias=False)
    linear.weight.copy_(numbers(*linear.weight.shape))
    twin = unwatched_twin(module, _modules={EXPANSION: linear})
    vars(twin).update(zip(SIZES, (rank, key, rotated, value), strict=True))
    latents, parts = numbers(2, 1, 7, rank), numbers(2, 1, 7, rotated)
    weight = linear.weight.view(heads, key + value, rank)
    made = torch.einsum("bitr,hdr->bhtd", latents, weight)
    ours = torch.cat([made[..., :key], parts.expand(-1, heads, -1, -1)], dim=-1), made[..., key:]
    return agree(
        lambda: original_class(module).expand_kv(twin, latents, parts), lambda: ours, Tolerance(absolute=1e-5)
    )
