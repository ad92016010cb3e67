"""The backend on our own C++ kernels: one call for decode, verification and prefill, K and V read where they are.

A query's result has the same bits whatever its batch, chunk, pages, other rows and number of threads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels import cpu as kernels
from ..kernels.cpu.attention import attend, attend_pages
from ..kernels.cpu.library import FLOATS
from ..kernels.layouts import KV, AttentionOptions, Ragged
from .contract import AttentionBackend, AttentionSpec, must_be_traced
from .sdpa import SdpaBackend

LARGEST_DIM = 1024


class CpuBackend(AttentionBackend):
    """Native attention on a CPU; rare cases (a mask, dropout, gradients, tracing) use torch."""

    name = "cpu"
    device_types = ("cpu",)
    row_invariant = True

    def __init__(self) -> None:
        self.torch = SdpaBackend()

    def refuses(self, spec: AttentionSpec) -> str | None:
        if spec.device_type != "cpu":
            return f"it runs on a CPU, not on {spec.device_type}"
        if spec.dtype not in FLOATS:
            return f"it computes in float32, bfloat16 and float16, not in {spec.dtype}".replace("torch.", "")
        if max(spec.head_dim, spec.value_dim) > LARGEST_DIM:
            return f"heads of {max(spec.head_dim, spec.value_dim)} numbers are larger than its {LARGEST_DIM}"
        if not spec.num_kv_heads or spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} heads of keys and values"
        return kernels.refusal()

    def dense(self, q: Tensor, kv: KV, options: AttentionOptions, *, mask: Tensor | None = None) -> Tensor:
        if mask is not None or options.dropout > 0 or must_be_traced(q, kv.k, kv.v, options.sinks):
            return self.torch.dense(q, kv, options, mask=mask)
        return attend(q, kv, options)

    def packed(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions) -> Tensor:
        if options.dropout > 0 or must_be_traced(q, kv.k, kv.v, options.sinks):
            return self.torch.packed(q, kv, ragged, options)
        return attend(q, kv, options, ragged)

    def paged(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions, *, return_lse: bool = False) -> Any:
        if must_be_traced(q, options.sinks):
            return self.torch.paged(q, kv, ragged, options, return_lse=return_lse)
        out, lse = attend_pages(q, kv, ragged, options, return_lse=return_lse)
        return (out, lse) if return_lse else out
