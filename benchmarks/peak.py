"""Peak resident memory of this process, from the kernel's own mark (man 5 proc, VmHWM)."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

PROC = Path("/proc/self")


def peak_bytes(run: Callable[[], object]) -> int | None:
    """How far `run` drives resident memory above where it stands; None where the system does not tell."""
    try:
        gc.collect()
        trim()
        (PROC / "clear_refs").write_text("5")  # sets the mark back to what is resident now
        before = status_bytes("VmRSS")
        run()
        return status_bytes("VmHWM") - before
    except OSError:
        return None


def trim() -> None:
    """Give freed memory back, which the next allocation would take without a trace."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if release is not None:
        release(0)


def status_bytes(field: str) -> int:
    lines = (PROC / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
