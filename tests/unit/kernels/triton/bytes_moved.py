"""Count the bytes that kernels load and store in Triton's interpreter.

Lanes that are masked out are not counted, and what several lanes of one load read is counted once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder


@dataclass
class BytesMoved:
    loaded: int = 0
    stored: int = 0

    @property
    def total(self) -> int:
        return self.loaded + self.stored


@contextmanager
def counted() -> Iterator[BytesMoved]:
    """What is loaded and stored inside of the block."""
    moved = BytesMoved()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counting_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        read = np.unique(ptrs.data[mask.data]) if ptrs.data.ndim == 1 else ptrs.data[mask.data]
        moved.loaded += read.size * _size(ptrs)
        return load(self, ptrs, mask, *rest)

    def counting_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        moved.stored += int(mask.data.sum()) * _size(ptrs)
        return store(self, ptrs, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", counting_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", counting_store)
        yield moved


def _size(pointers: Any) -> int:
    """The bytes of what the pointers point to."""
    element = pointers.get_element_ty()
    return int(max(8, element.primitive_bitwidth)) // 8
