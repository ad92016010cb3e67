"""Total and free memory of the host, within the container's limit, and of a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .container import ROOT, content_of, memory_limits


def host_memory(root: Path = ROOT) -> tuple[int | None, int | None]:
    """Return total and free bytes, within the container's limit.

    Free memory includes what the page cache would give back.
    """
    fields = dict(line.split(":") for line in (content_of(root / "proc/meminfo") or "").splitlines() if ":" in line)
    if "MemTotal" not in fields:
        return _installed_memory(), None
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, used in memory_limits(root):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def gpu_memory(device: torch.device) -> tuple[int, int]:
    free, total = torch.cuda.mem_get_info(device)
    return total, free


def pool_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU that one large pool can take; None for a host, which commits memory only on use."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch would give it back

    return gpu_memory(device)[1] + unused


def _installed_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return None
