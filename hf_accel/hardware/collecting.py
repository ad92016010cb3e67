"""Python's search for garbage, put off while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Iterator[None]:
    """Keep Python from looking for garbage within a block.

    Each look at the oldest objects goes over all that torch and transformers have made, which takes as long as the
    layers of a whole model.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
