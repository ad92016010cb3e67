"""The interface of attention backends, and the questions that choose one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..kernels.layouts import KV, AttentionOptions, Ragged


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The needs of a group of layers' attention, known before there are tensors.

    window, softcap: see AttentionOptions. sinks, dropout, bias: whether there are any. quantized_kv: int8, fp8 or
    int4 pages.
    """

    dtype: torch.dtype
    device_type: str
    head_dim: int
    value_dim: int
    num_heads: int
    num_kv_heads: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    quantized_kv: bool = False
    dropout: bool = False
    bias: bool = False


class AttentionBackend(ABC):
    """softmax(softcap(scale * q k^T) + mask + bias) v over three layouts of the same operands (kernels/layouts.py).

    Heads: Hq query heads read Hkv key heads in order, G = Hq / Hkv of them each; K and V are never repeated.
    A query that sees no key gets zeros. Results have the dtype of q.
    """

    name: str
    device_types: tuple[str, ...] = ()  # those it is meant for, the only ones for which "auto" mentions it; none: all
    row_invariant: bool = False  # a query's bits do not depend on the batch, the chunk or the threads
    capturable: bool = False  # paged() reads lengths and block tables on the device alone, so a CUDA graph can hold it

    @abstractmethod
    def refuses(self, spec: AttentionSpec) -> str | None:
        """Return why this backend cannot serve `spec`, as a clause; None if it can."""

    @abstractmethod
    def dense(self, q: Tensor, kv: KV, options: AttentionOptions, *, mask: Tensor | None = None) -> Tensor:
        """q [B, Hq, Q, D] over a dense kv -> [B, Q, Hq, Dv]; differentiable; options.bias is not added.

        mask: broadcastable to [B, Hq, Q, T], bool (True attends) or floating (added; -inf hides).
        mask, causal and window combine: a key must be visible to all of them.
        """

    def packed(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions) -> Tensor:
        """q [N, Hq, D] over a packed kv -> [N, Hq, Dv]; differentiable; options.bias is not added."""
        starts, key_starts = ragged.cu_q.tolist(), ragged.cu_k.tolist()
        parts = [q.new_zeros(0, q.shape[1], kv.v.shape[2])]
        for queries, keys in zip(pairwise(starts), pairwise(key_starts), strict=True):
            one = KV(_one_sequence(kv.k, keys), _one_sequence(kv.v, keys))
            parts.append(self.dense(_one_sequence(q, queries), one, options)[0])
        return torch.cat(parts)

    @abstractmethod
    def paged(
        self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions, *, return_lse: bool = False
    ) -> Any:  # Tensor, or (Tensor, Tensor) with return_lse
        """q [N, Hq, D] over a paged kv -> [N, Hq, Dv] (, lse [N, Hq] float32), without dropout or gradients.

        options.causal: if it is False, which backends of a CPU alone are given, a query sees all keys of its sequence.

        Slots that hold no visible key are never used, whatever is in them; entries of the block table that hold none
        are never read.
        lse: natural log of the softmax denominator, the sink's share included; -inf where that is 0. Parts over
        disjoint keys merge by weights exp(lse); give sinks to one of them only.
        """


@dataclass(frozen=True)
class PlannedAttention:
    """The record that patch() leaves on an attention module: the backend that the plan chose, its spec, and whether
    the module was causal.
    """

    backend: AttentionBackend
    spec: AttentionSpec
    is_causal: bool = True


def must_be_traced(*operands: Tensor | None) -> bool:
    """Return whether torch has to see the operators: for a gradient, or to compile them."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        return True
    return torch.compiler.is_compiling()


def empty_lse(q: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the lse of queries q [N, Hq, D] that have seen no key yet: [N, Hq] float32."""
    if sinks is None:
        return torch.full(q.shape[:2], float("-inf"), device=q.device)
    return sinks.float().expand(q.shape[:2]).clone()


def _one_sequence(packed: Tensor, span: tuple[int, int]) -> Tensor:
    """Return rows `span` of [N, H, D] as a batch of one, [1, H, n, D]."""
    return packed[slice(*span)].transpose(0, 1).unsqueeze(0)
