"""Measures how much of the machine other programs take: next to them a measurement is worth less."""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY = 0.3  # cores that other programs may take
SAMPLE = 2.0  # seconds of the observation
STAT = Path("/proc/stat")


def busy_cores(seconds: float = SAMPLE) -> float | None:
    """Return how many cores of the machine are busy while this process sleeps for `seconds`.

    Time that the host gives to its other guests counts where the host reports it.
    """
    before, start = _busy_ticks(), time.monotonic()
    if before is None:
        return None
    time.sleep(seconds)
    after = _busy_ticks()
    assert after is not None
    return (after - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - start)


def _busy_ticks() -> int | None:
    """Return the time that the system counted as neither idle nor waiting for a disk, in ticks of a core."""
    if not STAT.exists():
        return None
    user, nice, system, _, _, irq, soft_irq, steal = map(int, STAT.read_text(encoding="ascii").split()[1:9])
    return user + nice + system + irq + soft_irq + steal
