"""The backends on our own Triton kernel, for NVIDIA GPUs: decode, verification and prefill, K and V read in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import triton as kernels
from ..kernels.layouts import KV, AttentionOptions, Ragged
from .contract import AttentionBackend, AttentionSpec, must_be_traced
from .sdpa import SdpaBackend

LARGEST_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonBackend(AttentionBackend):
    """Attention over pages and packed keys by Triton; dense attention, gradients and tracing go through torch.

    row_invariant: all rows go through tiles of one shape, and a prompt is cut into parts of a few queries.
    """

    name = "triton"
    device_types = kernels.DEVICES
    capturable = True

    def __init__(self, *, row_invariant: bool) -> None:
        self.row_invariant = row_invariant
        self.torch = SdpaBackend()

    def refuses(self, spec: AttentionSpec) -> str | None:
        reason = kernels.refusal(spec.device_type)
        if reason is not None:
            return reason
        if spec.dtype not in DTYPES:
            return f"it computes in float32, bfloat16 and float16, not in {spec.dtype}".replace("torch.", "")
        if spec.bias:
            return "its kernel adds no bias of positions to the scores"
        largest = max(spec.head_dim, spec.value_dim)
        return None if largest <= LARGEST_DIM else f"heads of {largest} numbers are larger than its {LARGEST_DIM}"

    def dense(self, q: Tensor, kv: KV, options: AttentionOptions, *, mask: Tensor | None = None) -> Tensor:
        by_torch = mask is not None or options.dropout > 0 or must_be_traced(q, kv.k, kv.v, options.sinks)
        if by_torch or not self.row_invariant:
            return self.torch.dense(q, kv, options, mask=mask)
        (batch, _, num_queries, _), num_keys = q.shape, kv.k.shape[2]
        lengths = torch.full((batch,), num_keys, dtype=torch.int32, device=q.device)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * num_queries
        tokens, *states = (x.transpose(1, 2).flatten(0, 1) for x in (q, kv.k, kv.v))
        out = self.packed(tokens, KV(*states), Ragged(starts, lengths, num_queries, num_keys), options)
        return out.view(batch, num_queries, *out.shape[1:])

    def packed(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions) -> Tensor:
        if options.dropout > 0 or must_be_traced(q, kv.k, kv.v, options.sinks):
            return self.torch.packed(q, kv, ragged, options)
        return self._attention(q, kv, ragged._replace(block_table=None), options, return_lse=False)[0]

    def paged(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions, *, return_lse: bool = False) -> Any:
        if must_be_traced(q, options.sinks) or kv.k.dtype is not kv.v.dtype:
            return self.torch.paged(q, kv, ragged, options, return_lse=return_lse)
        if not kv.is_int4:
            out, lse = self._attention(q, kv, ragged, options, return_lse=return_lse)
        else:
            from ..kernels.triton.kv_write import rotated_heads

            out, lse = self._attention(rotated_heads(q), kv, ragged, options, return_lse=return_lse)
            out = rotated_heads(out)
        return (out, lse) if return_lse else out

    def _attention(
        self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions, *, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        # Triton is optional, and slow to import: only who uses it needs it.
        from ..kernels.triton.attention import attention

        return attention(q, kv, ragged, options, return_lse=return_lse, fixed_tiles=self.row_invariant)
