"""What random numbers a user's program gets next is not changed by what runs here."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_state_kept() -> Iterator[None]:
    """torch's, numpy's and Python's generators are after the block as they were before."""
    numpy = sys.modules.get("numpy")  # transformers has it; a program that does not needs none of its state
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(arrays)
