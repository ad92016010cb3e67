"""The one object that says what a pass carries besides the ids of its tokens. It is made where the pass begins.

Who runs a pass, or decides how, asks this object, and nobody asks the requests again.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from itertools import accumulate

from ..cache.step import TokenRange
from ..linear.adapters import PassAdapters
from .prompt_inputs import PassRows, Rows
from .sequence import Sequence


def may_carry(sequence: Sequence) -> bool:
    """Return whether passes of a sequence may carry anything; if not, all follows from ids and how many there are."""
    return sequence.inputs is not None or sequence.settings.adapter is not None


@dataclass(frozen=True, eq=False)
class Carried:
    """All that some tokens of a pass carry. A pass whose tokens carry nothing has none.

    rows: the tokens whose inputs do not follow from their ids. adapters: what is added to products in some rows; None
    for nothing.
    """

    rows: Rows = ()
    adapters: PassAdapters | None = None

    @staticmethod
    def of(sequences: abc.Sequence[Sequence], ranges: abc.Sequence[TokenRange]) -> Carried | None:
        """Return what a pass over these tokens carries. sequences: that of each range."""
        if not any(map(may_carry, sequences)):
            return None
        rows: list[PassRows] = []
        counts = [each.count for each in ranges]
        for sequence, each, end in zip(sequences, ranges, accumulate(counts), strict=True):
            if sequence.prompt_inputs is not None:
                rows += sequence.prompt_inputs.rows(end - each.count, each.start, each.count)
        adapters = PassAdapters.of([sequence.settings.adapter for sequence in sequences], counts)
        return Carried(rows, adapters) if rows or adapters is not None else None

    @property
    def graph_refusal(self) -> str:
        """Return why the pass cannot be a graph, as a clause."""
        return (
            "it has tokens whose inputs do not follow from their ids"
            if self.rows
            else "some of its rows have adapters"
        )
