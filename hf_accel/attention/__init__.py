"""Attention backends: one contract, an ordered choice, refusals in words."""

from __future__ import annotations

from ..errors import UnsupportedError
from .contract import AttentionBackend, AttentionSpec, PlannedAttention
from .cpu import CpuBackend
from .reference import ReferenceBackend
from .sdpa import SdpaBackend

BACKENDS: tuple[AttentionBackend, ...] = (CpuBackend(), SdpaBackend(), ReferenceBackend())


def choose(spec: AttentionSpec, name: str = "auto") -> tuple[AttentionBackend, list[tuple[str, str]]]:
    """The backend called `name`, or for "auto" the first that does not refuse `spec`.

    Returns it with (name, reason) of each that refused before it. Raises UnsupportedError when `name` is unknown,
    or when the backend refuses.
    """
    candidates = [backend for backend in BACKENDS if name in ("auto", backend.name)]
    if not candidates:
        known = ", ".join(repr(backend.name) for backend in BACKENDS)
        raise UnsupportedError(f"attention={name!r} is not known; choose 'auto' or one of {known}")
    refusals: list[tuple[str, str]] = []
    for backend in candidates:
        reason = backend.refuses(spec)
        if reason is None:
            return backend, refusals
        refusals.append((backend.name, reason))
    reasons = "; ".join(f"{refused} refuses: {reason}" for refused, reason in refusals)
    raise UnsupportedError(f"attention={name!r} cannot serve this model ({reasons}); use attention='auto'")


__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionSpec",
    "CpuBackend",
    "PlannedAttention",
    "ReferenceBackend",
    "SdpaBackend",
    "choose",
]
