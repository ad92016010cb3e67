"""Lines and tables, as plans, certificates, estimates and reports are printed, and their HTML in a notebook."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

Row = tuple[str, ...]  # its cells; a single one is a line of text across all columns
WIDTH = 100  # columns of a table
NARROWEST = 24  # columns for a reason, however long the rest is
STYLE = "text-align: left; white-space: pre-wrap"


class Printed:
    """Base of plans, certificates, estimates and reports, which have a __str__: repr() is that, in a notebook HTML."""

    def _table_rows(self) -> Iterable[Row]:
        """Return the rows in a notebook: lines of text, unless a class knows its columns."""
        return ((line,) for line in str(self).splitlines())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = list(self._table_rows())
        columns = max(map(len, rows), default=1)
        return f"<table>{''.join(_html_row(row, columns) for row in rows)}</table>"


@dataclass(frozen=True)
class Line:
    """One choice: about what, what was chosen, and why."""

    topic: str
    what: str
    choice: str
    reason: str


def row_of(line: Line) -> Row:
    return line.topic, line.what, line.choice, line.reason


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Yield rows of columns that fit in WIDTH: long reasons go on below, and a topic is named once."""
    cells = [(line.topic, line.what, line.choice) for line in lines]
    widths = [max((len(cell) for cell in column), default=0) for column in zip(*cells, strict=True)]
    indent = sum(widths) + 2 * len(widths)
    last = None
    for line, (topic, *others) in zip(lines, cells, strict=True):
        shown = ["" if topic == last else topic, *others]
        head = "".join(cell.ljust(width) + "  " for cell, width in zip(shown, widths, strict=True))
        reason = textwrap.wrap(line.reason, max(NARROWEST, WIDTH - indent), break_on_hyphens=False) or [""]
        yield (head + reason[0]).rstrip()
        yield from (" " * indent + more for more in reason[1:])
        last = topic


def _html_row(row: Row, columns: int) -> str:
    if len(row) == 1:
        return f'<tr><td colspan="{columns}" style="{STYLE}; font-family: monospace">{escape(row[0])}</td></tr>'
    cells = (f'<td style="{STYLE}">{escape(cell)}</td>' for cell in row)
    return f"<tr>{''.join(cells)}</tr>"
