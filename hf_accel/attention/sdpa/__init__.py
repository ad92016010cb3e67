"""The backend on torch's own operators, fast on a CPU and correct on every device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..base import AttentionBackend, AttentionSpec
from ..pages import Pages
from .dense import attend
from .paged import paged_attention


class SdpaBackend(AttentionBackend):
    """torch's scaled_dot_product_attention, and two batched products for what it is slow at or lacks."""

    name = "sdpa"

    def refuses(self, spec: AttentionSpec) -> str | None:
        return None

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        out, _ = attend(
            q,
            k,
            v,
            mask=mask,
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
        )
        return out.transpose(1, 2)

    def paged(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        k_scales: Tensor | None,
        v_scales: Tensor | None,
        block_table: Tensor,
        cu_q: Tensor,
        kv_len: Tensor,
        max_q: int,
        max_kv: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        pages = Pages(k_pages, v_pages, k_scales, v_scales)
        out, lse = paged_attention(
            q,
            pages,
            block_table,
            cu_q,
            kv_len,
            window=window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            return_lse=return_lse,
        )
        return (out, lse) if return_lse else out
