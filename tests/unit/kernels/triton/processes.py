"""Triton decides once in a process whether it interprets or compiles: each test here needs one of the two."""

from __future__ import annotations

import pytest

from hf_accel.kernels import triton

_is_interpreted = triton.is_interpreted()
interpreted = pytest.mark.skipif(not _is_interpreted, reason="it needs TRITON_INTERPRET=1; as in test_triton.py")
compiled = pytest.mark.skipif(
    _is_interpreted or not triton.is_installed(), reason="it needs Triton's compiler, without TRITON_INTERPRET=1"
)
