"""Compressed keys (multi-head latent attention, DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

A layer writes the `rank` numbers from which a token's keys and values are made as K [.., 1, rank], and the rotated
part of the keys, which all heads share, as V [.., 1, Dr]. A page holds one behind the other as its keys, and no
values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...kernels.layouts import KV
from ..group import PageForm, PageGroup
from ..quantized import INT4, PageDtypes
from .kind import GroupSettings, Kind, TokenNumbers

RANK = "kv_lora_rank"  # the setting that says how many numbers stand for a token's keys and values


class CompressedForm(PageForm):
    """The form of compressed keys of `rank` numbers."""

    def __init__(self, rank: int) -> None:
        self.rank: int = rank

    def joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Raises UnsupportedError for keys and values that are not compressed."""
        if keys.shape[-2:] != (1, self.rank):
            raise UnsupportedError(
                f"the pages hold compressed keys of {self.rank} numbers, and a layer writes {keys.shape[-2]} heads of "
                f"{keys.shape[-1]}; use transformers' own cache"
            )
        keys = torch.cat([keys, values], dim=-1)
        return keys, keys[..., :0]

    def parted(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys[..., : self.rank], keys[..., self.rank :]

    def attended(self, pages: KV) -> KV:
        """The values of compressed keys are a part of these."""
        return KV(pages.k, pages.k[..., : self.rank], pages.k_scales, pages.k_scales)


@dataclass(frozen=True)
class CompressedKeys(Kind):
    """Compressed keys of `rank` numbers, and the rotated part."""

    rank: int

    device_clause: ClassVar[str | None] = "caches compressed keys, whose pages are read on a CPU alone"
    ranks_clause: ClassVar[str | None] = "no rank knows how to attend over a part of the compressed keys"

    def group(self, **settings: Unpack[GroupSettings]) -> PageGroup:
        group = PageGroup(window=self.window, **settings)
        group.form = CompressedForm(self.rank)
        return group

    def numbers(self, layer: Any) -> TokenNumbers:
        size = layer.kv_lora_rank + layer.qk_rope_head_dim
        return TokenNumbers(layer.num_attention_heads, 1, size, 0, read=layer.kv_lora_rank)

    def dtype_refusal(self, quantized: PageDtypes) -> str | None:
        if INT4 not in quantized:
            return None
        if quantized.differ:
            return "compressed keys hold the values too, so that both have one dtype; take 'int8'"
        return "int4 pages rotate compressed keys whole, and attention reads a part of them as values; take 'int8'"
