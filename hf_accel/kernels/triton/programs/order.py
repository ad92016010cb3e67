"""The order of launches that overlap: one begins while the one before it still runs (programmatic dependent launch).

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_for_the_one_before(OVERLAPS: tl.constexpr):
    """Wait until the launch before this one has ended, and all its writes are there; does nothing without OVERLAPS.

    Every program of an overlapping launch must do so before it reads what a launch may have written, and before it
    writes: the next launch then knows that all launches before it have ended.
    """
    if OVERLAPS:
        cuda.gdc_wait()


@triton.jit
def let_the_next_begin(OVERLAPS: tl.constexpr):
    """Let the next launch begin, up to its `wait_for_the_one_before`, once all programs have come here.

    This belongs to the end of a program. Programs that wait from the beginning on take the place of those that work: a
    step of 8 billion parameters in INT8 took 4.8 ms so on an H200, 3.6 without overlapping, and 3.5 with it.
    """
    if OVERLAPS:
        cuda.gdc_launch_dependents()
