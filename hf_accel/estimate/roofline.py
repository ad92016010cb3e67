"""The time that work takes, between two limits.

At least: the shorter of reading and arithmetic hides behind the longer (roofline, Williams et al. 2009,
doi:10.1145/1498765.1498785). That is all that can be said of a machine whose data sheet alone is known.
At most: one after the other. On a CPU that was measured, arithmetic is what the products took beyond reading.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# Operations per byte where only one speed is given: between CPUs (10 to 50) and data-centre GPUs (150 to 300).
TYPICAL_BALANCE = 100.0


class Work(NamedTuple):
    """The bytes that one pass of a model reads and the operations that it does.

    quantized, attention: the operations that multiply by quantized weights, and those of attention. fp8: the quantized
    ones whose inputs are rounded to FP8.
    rows: tokens of the pass; queries: queries of each sequence; 0 means many. layers: the layers with attention.
    """

    nbytes: float
    operations: float
    quantized: float = 0.0
    attention: float = 0.0
    rows: float = 0
    queries: float = 0
    layers: int = 0
    fp8: float = 0.0


class ByRows(NamedTuple):
    """The time of arithmetic by the number of rows: seconds for each weight, without the time to read it.

    rows: ascending, from 1 on. Between two of them seconds grow evenly, beyond the last one with the rows.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def speed(self, rows: float) -> float:
        """Return the operations per second with `rows` rows, two per multiply-add; 0 rows mean many."""
        last = self.rows[-1]
        within = min(max(1.0, rows or last), last)
        after = next(i for i, known in enumerate(self.rows) if known >= within)
        before = max(0, after - 1)
        width = self.rows[after] - self.rows[before]
        share = (within - self.rows[before]) / width if width else 0.0
        seconds = self.seconds[before] + share * (self.seconds[after] - self.seconds[before])
        return 2 * within / seconds if seconds else math.inf


class Machine(NamedTuple):
    """bandwidth: bytes per second; compute: operations per second, two per multiply-add, of what has no speed below.

    floats, quantized, attention: products with weights as they are and with quantized ones, and attention by the
        queries of a sequence; None: as fast as compute.
    pass_seconds, layer_seconds: what comes on top for each pass, and for each of its layers.
    fp8: operations per second on FP8 inputs, of a machine whose products were not measured; 0: as fast as compute.
    """

    bandwidth: float
    compute: float
    floats: ByRows | None = None
    quantized: ByRows | None = None
    attention: ByRows | None = None
    pass_seconds: float = 0.0
    layer_seconds: float = 0.0
    fp8: float = 0.0

    @classmethod
    def given(cls, *, bandwidth: float | None, compute: float | None, compute_fp8: float | None = None) -> Machine:
        """Make a machine from one or two numbers; TYPICAL_BALANCE gives the missing one."""
        if bandwidth is None:
            bandwidth = (compute or 0.0) / TYPICAL_BALANCE
        return cls(bandwidth, compute or bandwidth * TYPICAL_BALANCE, fp8=compute_fp8 or 0.0)

    def reading(self, work: Work) -> float:
        """Return the seconds of reading."""
        return work.nbytes / self.bandwidth

    def computing(self, work: Work) -> float:
        """Return the seconds of arithmetic."""
        floats = work.operations - work.quantized - work.attention
        quantized = self._speed(self.quantized, work.rows)
        fp8 = self.fp8 if self.fp8 and self.quantized is None else quantized
        return (
            floats / self._speed(self.floats, work.rows)
            + (work.quantized - work.fp8) / quantized
            + work.fp8 / fp8
            + work.attention / self._speed(self.attention, work.queries)
        )

    def _speed(self, speeds: ByRows | None, rows: float) -> float:
        return self.compute if speeds is None else speeds.speed(rows)

    def around(self, work: Work) -> float:
        """Return the seconds that come on top, by the pass and its layers."""
        return self.pass_seconds + work.layers * self.layer_seconds

    @property
    def is_measured(self) -> bool:
        """True if its products were measured, so that more is known than its two numbers."""
        return self.floats is not None or self.quantized is not None

    def seconds(self, work: Work) -> float:
        """Return the least seconds; on a machine that was measured, about the seconds that it takes."""
        return self.seconds_in_turn(work) if self.is_measured else max(self.reading(work), self.computing(work))

    def seconds_in_turn(self, work: Work) -> float:
        """Return the most seconds at these speeds: nothing is read while something is computed."""
        return self.reading(work) + self.computing(work) + self.around(work)

    def bound(self, work: Work) -> str:
        """Return which of "memory" and "compute" takes longer."""
        return "compute" if self.computing(work) > self.reading(work) else "memory"
