"""The backends on FlashAttention (Dao 2023, arXiv 2307.08691): of the package flash-attn, and the one inside torch.

They serve prompts. They also read pages where they can; our own kernel reads other pages (blocks of few tokens, fewer
bits).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from ..kernels import triton as kernels
from ..kernels.layouts import KV, AttentionOptions, Ragged
from .contract import AttentionBackend, AttentionSpec, must_be_traced
from .sdpa import SdpaBackend
from .triton import TritonBackend

HOPPER = (9, 0)


class FlashLibrary(ABC):
    """One implementation of FlashAttention. has_softcap: whether it bounds scores."""

    has_softcap = True

    @abstractmethod
    def refusal(self) -> str | None:
        """Return why it cannot be used here, as a clause; None if it can."""

    @abstractmethod
    def reads(self, block_size: int) -> bool:
        """Return whether it reads pages whose blocks have so many tokens."""

    @abstractmethod
    def attend(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions) -> Tensor:
        """q [N, Hq, D] over packed keys, or over pages [num_blocks, block_size, Hkv, D] where `ragged` has a block
        table -> [N, Hq, D]."""


class FlashAttention2(FlashLibrary):
    """The package flash-attn, version 2.6 or later, which bounds scores."""

    module = "flash_attn"

    def refusal(self) -> str | None:
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        version = str(getattr(importlib.import_module(self.module), "__version__", "0.0"))
        if tuple(int(part) for part in version.split(".")[:2]) < (2, 6):
            return f"flash_attn {version} is older than 2.6"
        return None

    def reads(self, block_size: int) -> bool:
        return block_size % 256 == 0

    def attend(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions) -> Tensor:
        function = importlib.import_module(self.module).flash_attn_varlen_func
        out: Tensor = function(
            q, kv.k, kv.v, ragged.cu_q, ragged.cu_k, ragged.max_q, ragged.max_kv, softmax_scale=options.scale,
            causal=options.causal, window_size=window_size(options), softcap=options.softcap or 0.0,
            block_table=ragged.block_table,
        )  # fmt: skip
        return out


class FlashAttention3(FlashLibrary):
    """The package flash-attn-3 for Hopper, whose blocks of pages have any size."""

    module = "flash_attn_interface"

    def refusal(self) -> str | None:
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        return None if kernels.capability() == HOPPER else "FlashAttention-3 is for GPUs of compute capability 9.0"

    def reads(self, block_size: int) -> bool:
        return True

    def attend(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions) -> Tensor:
        module = importlib.import_module(self.module)
        shared = {
            "softmax_scale": options.scale, "causal": options.causal, "window_size": window_size(options),
            "softcap": options.softcap or 0.0,
        }  # fmt: skip
        if ragged.block_table is None:
            packed: Tensor = module.flash_attn_varlen_func(
                q, kv.k, kv.v, ragged.cu_q, ragged.cu_k, ragged.max_q, ragged.max_kv, **shared
            )
            return packed
        paged: Tensor = module.flash_attn_with_kvcache(
            q, kv.k, kv.v, cache_seqlens=ragged.kv_len, page_table=ragged.block_table, cu_seqlens_q=ragged.cu_q,
            max_seqlen_q=ragged.max_q, **shared,
        )  # fmt: skip
        return paged


class TorchVarlen(FlashLibrary):
    """torch.nn.attention.varlen; block tables came with torch 2.12."""

    has_softcap = False

    def refusal(self) -> str | None:
        return None  # in every torch that is supported

    def reads(self, block_size: int) -> bool:
        return block_size % 256 == 0 and "block_table" in self._parameters

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(varlen.varlen_attn).parameters

    def attend(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions) -> Tensor:
        more: dict[str, Any] = {}
        if ragged.block_table is not None:
            more = {"block_table": ragged.block_table, "seqused_k": ragged.kv_len}
        if "enable_gqa" in self._parameters:  # before, FlashAttention's own rule held: heads are grouped as they come
            more["enable_gqa"] = q.shape[1] != kv.k.shape[-2]
        left, right = window_size(options)
        # Here causal attention is a window as well: no keys to the right.
        out: Tensor = varlen.varlen_attn(  # type: ignore[assignment]  # a tuple only where more is asked for
            q, kv.k, kv.v, ragged.cu_q, ragged.cu_k, ragged.max_q, ragged.max_kv, scale=options.scale,
            window_size=(left, 0 if options.causal else right), **more,
        )  # fmt: skip
        return out


def window_size(options: AttentionOptions) -> tuple[int, int]:
    """Return the window in FlashAttention's terms: keys to the left and to the right of a query's own; -1 for all."""
    return (-1 if options.window is None else options.window - 1), -1


class FlashBackend(AttentionBackend):
    """FlashAttention for prompts, and for pages that it can read; our Triton kernel for other pages."""

    device_types = ("cuda",)
    capturable = True

    def __init__(self, name: str, library: FlashLibrary) -> None:
        self.name, self.library = name, library
        self.torch, self.triton = SdpaBackend(), TritonBackend(row_invariant=False)

    def refuses(self, spec: AttentionSpec) -> str | None:
        reason = self.library.refusal() if spec.device_type == "cuda" else None
        reason = reason or self.triton.refuses(spec)  # it reads the pages that FlashAttention does not
        if reason is not None:
            return reason
        if spec.dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in bfloat16 and float16, not in {spec.dtype}".replace("torch.", "")
        if spec.head_dim != spec.value_dim or spec.head_dim % 8:
            return f"it takes heads of a multiple of 8 numbers, as many of K as of V, not {spec.head_dim}"
        if spec.sinks:
            return "it has no attention sinks"
        return None if spec.softcap is None or self.library.has_softcap else "it does not bound scores"

    def dense(self, q: Tensor, kv: KV, options: AttentionOptions, *, mask: Tensor | None = None) -> Tensor:
        return self.torch.dense(q, kv, options, mask=mask)

    def packed(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions) -> Tensor:
        if options.dropout > 0 or must_be_traced(q, kv.k, kv.v, options.sinks):
            return self.torch.packed(q, kv, ragged, options)
        return self.library.attend(q, kv, ragged._replace(block_table=None), options)

    def paged(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions, *, return_lse: bool = False) -> Any:
        reads = kv.k_scales is None and self.library.reads(kv.k.shape[2])
        if not reads or return_lse or must_be_traced(q, options.sinks):
            return self.triton.paged(q, kv, ragged, options, return_lse=return_lse)
        by_token = KV(kv.k.transpose(1, 2), kv.v.transpose(1, 2))  # views: only the last dimension must be contiguous
        return self.library.attend(q, by_token, ragged, options)
