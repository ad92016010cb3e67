"""Every backend as a parameter of a test; what needs a GPU (or Triton's interpreter) carries the gpu mark."""

from __future__ import annotations

import pytest

from hf_accel.attention import BACKENDS, AttentionBackend, TritonBackend
from hf_accel.attention.flash import FlashBackend


def _parameter(backend: AttentionBackend) -> object:
    on_gpu = "cuda" in backend.device_types
    kind = backend.library.module if backend.name == "flash_attn" else backend.name  # type: ignore[attr-defined]
    name = f"{kind} by row" if on_gpu and backend.row_invariant else kind
    return pytest.param(backend, id=name, marks=[pytest.mark.gpu] if on_gpu else [])


def _takes_torch(backend: AttentionBackend) -> bool:
    return isinstance(backend, FlashBackend) or (isinstance(backend, TritonBackend) and backend.row_invariant)


each_backend = pytest.mark.parametrize("backend", [_parameter(backend) for backend in BACKENDS])
# Those for GPUs all take torch's attention over dense keys, so one of them stands for all.
each_dense_backend = pytest.mark.parametrize(
    "backend", [_parameter(backend) for backend in BACKENDS if not _takes_torch(backend)]
)
