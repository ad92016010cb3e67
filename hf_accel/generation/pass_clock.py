"""The clock of passes, whose seconds say what drafts cost. It stands still while a pass does what is done once.

A graph that is captured takes as long as many passes, and no later pass of its shape takes that again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    once = 0.0  # seconds


_thread = _Thread()


def now() -> float:
    """Seconds, of which only differences within one thread mean something."""
    return time.perf_counter() - _thread.once


@contextmanager
def done_once() -> Iterator[None]:
    """Stop the clock of this thread."""
    start = now()
    try:
        yield
    finally:
        _thread.once += now() - start
