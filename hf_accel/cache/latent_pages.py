"""Compressed keys in pages (multi-head latent attention, DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

A layer writes the `rank` numbers from which a token's keys and values are made as K [.., 1, rank], and the rotated
part of the keys, which all heads share, as V [.., 1, Dr]. A page holds one behind the other as its keys, and no
values. In all functions here, rank=None stands for keys and values that are not compressed, which stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..kernels.layouts import KV


def joined(keys: Tensor, values: Tensor, rank: int | None) -> tuple[Tensor, Tensor]:
    """Return K and V [..., H, D] that a layer writes as the pages hold them.

    Raises UnsupportedError for keys and values that are not compressed, where the pages are for such.
    """
    if rank is None:
        return keys, values
    if keys.shape[-2:] != (1, rank):
        raise UnsupportedError(
            f"the pages hold compressed keys of {rank} numbers, and a layer writes {keys.shape[-2]} heads of "
            f"{keys.shape[-1]}; use transformers' own cache"
        )
    keys = torch.cat([keys, values], dim=-1)
    return keys, keys[..., :0]


def parted(keys: Tensor, values: Tensor, rank: int | None) -> tuple[Tensor, Tensor]:
    """Return K and V [..., H, D] of pages as a layer wrote them; the inverse of `joined`."""
    return (keys, values) if rank is None else (keys[..., :rank], keys[..., rank:])


def attended(pages: KV, rank: int | None) -> KV:
    """Return a layer's pages as attention reads them. The values of compressed keys are a part of these."""
    return pages if rank is None else KV(pages.k, pages.k[..., :rank], pages.k_scales, pages.k_scales)
