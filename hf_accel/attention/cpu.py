"""The backend on our own C++ kernels: one call for decode, verification and prefill, K and V read where they are.

A query's result has the same bits whatever stands beside it: batch, chunk, pages or rows, number of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import cpu as kernels
from ..kernels.cpu.attention import attend, attend_pages
from ..kernels.cpu.library import FLOATS
from .base import AttentionBackend, AttentionSpec
from .sdpa import SdpaBackend

LARGEST_DIM = 512


class CpuBackend(AttentionBackend):
    """Native attention on a CPU; what is rare there (a mask, dropout, gradients, tracing) goes through torch."""

    name = "cpu"

    def __init__(self) -> None:
        self.torch = SdpaBackend()

    def refuses(self, spec: AttentionSpec) -> str | None:
        if spec.device_type != "cpu":
            return f"it runs on a CPU, not on {spec.device_type}"
        if spec.dtype not in FLOATS:
            return f"it computes in float32, bfloat16 and float16, not in {spec.dtype}".replace("torch.", "")
        if max(spec.head_dim, spec.value_dim) > LARGEST_DIM:
            return f"heads of {max(spec.head_dim, spec.value_dim)} numbers are larger than its {LARGEST_DIM}"
        return kernels.refusal()

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
        options: dict[str, Any] = {
            "causal": causal, "scale": scale, "window": window, "softcap": softcap, "sinks": sinks
        }  # fmt: skip
        if mask is not None or dropout > 0 or must_be_traced(q, k, v, sinks):
            return self.torch.dense(q, k, v, mask=mask, dropout=dropout, **options)
        return attend(q, k, v, **options)

    def packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        causal: bool,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        ends: dict[str, Any] = {"cu_q": cu_q, "cu_k": cu_k}
        options: dict[str, Any] = {
            "causal": causal, "scale": scale, "window": window, "softcap": softcap, "sinks": sinks
        }  # fmt: skip
        if dropout > 0 or must_be_traced(q, k, v, sinks):
            return self.torch.packed(q, k, v, **ends, max_q=max_q, max_k=max_k, dropout=dropout, **options)
        return attend(q, k, v, **{name: x.to(torch.int32).contiguous() for name, x in ends.items()}, **options)

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
        options: dict[str, Any] = {
            "scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "return_lse": return_lse
        }  # fmt: skip
        if must_be_traced(q, sinks):
            return self.torch.paged(
                q, k_pages, v_pages, k_scales, v_scales, block_table, cu_q, kv_len, max_q, max_kv, **options
            )
        out, lse = attend_pages(q, k_pages, v_pages, k_scales, v_scales, block_table, cu_q, kv_len, **options)
        return (out, lse) if return_lse else out


def must_be_traced(*operands: Tensor | None) -> bool:
    """Whether torch has to see the operators: for a gradient, or to compile them."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        return True
    return torch.compiler.is_compiling()
