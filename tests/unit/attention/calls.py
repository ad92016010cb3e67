"""Backends called with plain keywords."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_accel.attention import AttentionBackend
from hf_accel.kernels.layouts import KV, AttentionOptions

from ...devices import device_of
from .paging import on


def dense(
    backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """On the backend's device, from and to the CPU."""
    device = device_of(backend)
    q, k, v, mask = (on(x, device) for x in (q, k, v, mask))
    given = AttentionOptions(**{name: on(x, device) for name, x in options.items()})
    return backend.dense(q, KV(k, v), given, mask=mask).cpu()
