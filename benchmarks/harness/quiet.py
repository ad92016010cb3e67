"""Nothing is measured while something else runs here."""

from __future__ import annotations

import time

from hf_accel.hardware.busy import BUSY, SAMPLE, busy_cores

GLANCE = 0.2  # seconds that are looked at where nothing depends on it
PATIENCE = 300.0  # seconds to wait for the machine to become quiet


class BusyMachineError(Exception):
    """Something else takes this machine's time."""


def wait_until_quiet(*, even_busy: bool) -> float | None:
    """Cores that others take now, None where that cannot be seen. even_busy: take it as it is, and go on.

    Raises BusyMachineError if it stays above BUSY for PATIENCE seconds.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        busy = busy_cores(GLANCE if even_busy else SAMPLE)
        if busy is None or busy < BUSY or even_busy:
            return busy
        if time.monotonic() > deadline:
            raise BusyMachineError(
                f"other processes take {busy:.1f} cores, and a quiet machine is one below {BUSY}: stop them, or pass "
                "--even-busy, and the result says how busy it was"
            )
        print(f"    waiting: other processes take {busy:.1f} cores", flush=True)
        time.sleep(SAMPLE)
