from __future__ import annotations

import pytest
import torch

from hf_accel.attention import AttentionSpec

ANY = AttentionSpec(
    dtype=torch.float32, device_type="cpu", head_dim=8, value_dim=8, num_heads=4, num_kv_heads=2
)  # fmt: skip


@pytest.fixture(autouse=True)
def served(request: pytest.FixtureRequest) -> None:
    """Skip a backend that cannot run here at all, in its own words."""
    backend = request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else None
    reason = backend.refuses(ANY) if backend is not None else None
    if reason is not None:
        pytest.skip(reason)
