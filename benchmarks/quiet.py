"""What else runs here: the time that it takes is missing from what is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY = 0.3  # cores that others may take
SAMPLE = 2.0  # seconds that are looked at
PATIENCE = 300.0  # seconds to wait for the machine to become quiet
STAT = Path("/proc/stat")


class BusyMachineError(Exception):
    """Something else takes this machine's time."""


def wait_until_quiet(*, even_busy: bool) -> float | None:
    """Cores that others take now, None where that cannot be seen. even_busy: take it as it is, and go on.

    Raises BusyMachineError if it stays above BUSY for PATIENCE seconds.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        busy = busy_cores()
        if busy is None or busy < BUSY or even_busy:
            return busy
        if time.monotonic() > deadline:
            raise BusyMachineError(
                f"other processes take {busy:.1f} cores, and a quiet machine is one below {BUSY}: stop them, or pass "
                "--even-busy, and the result says how busy it was"
            )
        print(f"    waiting: other processes take {busy:.1f} cores", flush=True)
        time.sleep(SAMPLE)


def busy_cores() -> float | None:
    """Of the whole machine while this process sleeps; other guests of the host count as far as it says so."""
    before, start = _busy_ticks(), time.monotonic()
    if before is None:
        return None
    time.sleep(SAMPLE)
    after = _busy_ticks()
    assert after is not None
    return (after - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - start)


def _busy_ticks() -> int | None:
    """All that the kernel has counted as neither idle nor waiting for a disk, in ticks of a core."""
    if not STAT.exists():
        return None
    user, nice, system, _, _, irq, soft_irq, steal = map(int, STAT.read_text(encoding="ascii").split()[1:9])
    return user + nice + system + irq + soft_irq + steal
