"""Attention backends: one contract, an ordered choice, refusals in words."""

from __future__ import annotations

from ..errors import UnsupportedError
from .contract import AttentionBackend, AttentionSpec, PlannedAttention
from .cpu import CpuBackend
from .flash import FlashAttention2, FlashAttention3, FlashBackend, TorchVarlen
from .reference import ReferenceBackend
from .sdpa import SdpaBackend
from .triton import TritonBackend

BACKENDS: tuple[AttentionBackend, ...] = (
    CpuBackend(),
    FlashBackend("flash_attn", FlashAttention3()),
    FlashBackend("flash_attn", FlashAttention2()),
    FlashBackend("varlen", TorchVarlen()),
    TritonBackend(row_invariant=False),
    TritonBackend(row_invariant=True),
    SdpaBackend(),
    ReferenceBackend(),
)


def choose_backend(
    spec: AttentionSpec, name: str = "auto", *, row_invariant: bool = False
) -> tuple[AttentionBackend, list[tuple[str, str]]]:
    """Choose the backend called `name`, or for "auto" the first that does not refuse `spec`.

    row_invariant: whether backends that are row-invariant come before the others.
    Returns it with (name, reason) of each that refused before it. "auto" leaves out those for other kinds of devices,
    and asks none behind the first that serves. Raises UnsupportedError when `name` is unknown, or when the backend
    refuses.
    """
    candidates = [backend for backend in BACKENDS if name in ("auto", backend.name)]
    if row_invariant:
        candidates = sorted(candidates, key=lambda backend: not backend.row_invariant)
    if not candidates:
        known = ", ".join(dict.fromkeys(repr(backend.name) for backend in BACKENDS))
        raise UnsupportedError(f"attention={name!r} is not known; choose 'auto' or one of {known}")
    refusals: dict[str, str] = {}
    for backend in candidates:
        if name == "auto" and backend.device_types and spec.device_type not in backend.device_types:
            continue
        reason = backend.refuses(spec)
        if reason is None:
            return backend, list(refusals.items())
        refusals[backend.name] = reason
    reasons = "; ".join(f"{refused} refuses: {reason}" for refused, reason in refusals.items())
    raise UnsupportedError(f"attention={name!r} cannot serve this model ({reasons}); use attention='auto'")


__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionSpec",
    "CpuBackend",
    "PlannedAttention",
    "ReferenceBackend",
    "SdpaBackend",
    "TritonBackend",
    "choose_backend",
]
