"""Attention over compressed keys: multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

A layer keeps a few numbers of a token, the latent, from which a linear layer makes the keys and values of all heads,
and the rotated part of the keys, which all heads share. Pages hold these alone. The part of the linear layer that
makes keys multiplies the queries instead, and the part that makes values the results: so attention reads the latents
themselves, as one head of keys, and as values a part of these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...kernels.layouts import KV
from ...recognition.cache_code import EXPANDS
from ...recognition.code import code_of
from ...recognition.expanded_keys import EXPANSION, SIZES
from ...recognition.trial import RandomNumbers, Tolerance, agree, unwatched_twin
from ...undo.journal import original_class


def expanded(module: Any, kv: tuple[torch.Tensor, torch.Tensor]) -> KV:
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
