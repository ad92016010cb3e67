"""The backend on torch's own operators, fast on a CPU and correct on every device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...kernels.layouts import KV, AttentionOptions, Ragged
from ..contract import AttentionBackend, AttentionSpec
from .dense import attend
from .gathering import paged_attention


class SdpaBackend(AttentionBackend):
    """torch's scaled_dot_product_attention, and two batched products where it is slow or lacks an option."""

    name = "sdpa"

    def refuses(self, spec: AttentionSpec) -> str | None:
        return None

    def dense(self, q: Tensor, kv: KV, options: AttentionOptions, *, mask: Tensor | None = None) -> Tensor:
        return attend(q, kv, mask, options)[0].transpose(1, 2)

    def paged(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions, *, return_lse: bool = False) -> Any:
        out, lse = paged_attention(q, kv, ragged, options, return_lse=return_lse)
        return (out, lse) if return_lse else out
