"""Tables of measurements: made by the topics, stored as JSON, printed as Markdown.

The end of a column's name says what is in it: seconds, bytes, share (of 1), ratio (against stock), percent (of
change), perplexity, nats, cosine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """rows all have the same keys; note says what a reader must know to read them."""

    title: str
    rows: Sequence[Row]
    note: str = ""

    def markdown(self) -> str:
        columns = list(self.rows[0])
        lines = [[column.replace("_", " ") for column in columns], ["---", *["---:"] * (len(columns) - 1)]]
        lines += [[cell(column, row[column]) for column in columns] for row in self.rows]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"### {self.title}\n\n{text}\n" + (f"\n{self.note}\n" if self.note else "")


def cell(column: str, value: Any) -> str:
    """A value in the unit that its column's name ends with."""
    if value is None:
        return "-"
    kind = column.rsplit("_", 1)[-1]
    if kind == "seconds":
        return f"{value:,.2f} s" if value >= 10 else f"{1e3 * value:,.2f} ms"
    if kind == "bytes" and value < 1e5:
        return f"{value:,.0f} B"
    if kind == "bytes":
        return f"{value / 1e6:,.2f} MB"
    if kind == "share":
        return f"{value:.1%}"
    if kind in ("ratio", "product"):
        return f"{value:,.2f}x"
    if kind == "percent":
        return f"{value:+.3f} %"
    if kind in ("perplexity", "nats", "cosine"):
        return f"{value:.5f}"
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
