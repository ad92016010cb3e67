"""What else runs here: the time that it takes is missing from what is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY = 0.3  # cores that others may take
SAMPLE = 2.0  # seconds that are looked at
STAT = Path("/proc/stat")


def busy_cores(seconds: float = SAMPLE) -> float | None:
    """Of the whole machine while this process sleeps so long; other guests of the host count as far as it says so."""
    before, start = _busy_ticks(), time.monotonic()
    if before is None:
        return None
    time.sleep(seconds)
    after = _busy_ticks()
    assert after is not None
    return (after - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - start)


def _busy_ticks() -> int | None:
    """All that the kernel has counted as neither idle nor waiting for a disk, in ticks of a core."""
    if not STAT.exists():
        return None
    user, nice, system, _, _, irq, soft_irq, steal = map(int, STAT.read_text(encoding="ascii").split()[1:9])
    return user + nice + system + irq + soft_irq + steal
