from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_accel.attention import AttentionSpec

from ...devices import device_of

ANY = AttentionSpec(
    dtype=torch.float32, device_type="cpu", head_dim=8, value_dim=8, num_heads=4, num_kv_heads=2
)  # fmt: skip


@pytest.fixture(autouse=True)
def served(request: pytest.FixtureRequest) -> None:
    """Skip a backend that cannot run here at all, in its own words."""
    backend = request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else None
    reason = None if backend is None else backend.refuses(replace(ANY, device_type=device_of(backend)))
    if reason is not None:
        pytest.skip(reason)
