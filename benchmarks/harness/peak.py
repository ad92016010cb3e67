"""Resident memory of this process: its peak, from the kernel's own mark, and its kinds, from samples (man 5 proc)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from hf_accel.hardware import trim

PROC = Path("/proc/self")
TOTAL, MARK = "VmRSS", "VmHWM"
KINDS = {"anonymous_bytes": "RssAnon", "mapped_bytes": "RssFile", "shared_bytes": "RssShmem"}
PAUSE = 0.001  # seconds between samples


def peak_bytes(run: Callable[[], object]) -> int | None:
    """How far `run` drives resident memory above where it stands; None where the system does not tell."""
    found = peaks(run, resident())
    return None if found is None else found["peak_bytes"]


def resident() -> dict[str, int] | None:
    """Bytes in memory now, by the names that /proc has for them, without what malloc keeps; None where it has none."""
    gc.collect()
    trim()
    try:
        return status()
    except OSError:
        return None


def peaks(run: Callable[[], object], before: Mapping[str, int] | None) -> dict[str, int] | None:
    """How far `run` drives resident memory above `before`: in all, and each kind by itself, at its own time.

    Anonymous memory is the process's own. The system can drop mapped pages of files, and read them again. Returns
    None where the system does not tell.
    """
    try:
        (PROC / "clear_refs").write_text("5")  # sets the mark back to what is resident now
        highest = status()
    except OSError:
        run()
        return None
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(highest, done), daemon=True)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    _note(highest)
    assert before is not None
    kinds = {name: highest[field] - before[field] for name, field in KINDS.items()}
    return {"peak_bytes": highest[MARK] - before[TOTAL], **kinds}


def _watch(highest: dict[str, int], done: threading.Event) -> None:
    while not done.wait(PAUSE):
        _note(highest)


def _note(highest: dict[str, int]) -> None:
    for field, value in status().items():
        highest[field] = max(highest[field], value)


def status() -> dict[str, int]:
    pairs = (line.split(":", 1) for line in (PROC / "status").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in pairs if name in (TOTAL, MARK, *KINDS.values())}
