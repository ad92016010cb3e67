"""Backends called with plain keywords."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_accel.attention import AttentionBackend
from hf_accel.layouts import KV, AttentionOptions


def dense(
    backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **options: Any
) -> Tensor:
    return backend.dense(q, KV(k, v), AttentionOptions(**options), mask=mask)
