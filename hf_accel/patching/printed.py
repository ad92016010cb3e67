"""A base of objects that are read as tables: print(), repr() and a notebook show the same."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

Row = tuple[str, ...]  # its cells; a single one is a line of text across all columns
STYLE = "text-align: left; white-space: pre-wrap"


class Printed:
    """Base of plans, certificates, estimates and reports, which have a __str__: repr() is that, in a notebook HTML."""

    def _table_rows(self) -> Iterable[Row]:
        """The rows in a notebook: lines of text, unless a class knows its columns."""
        return ((line,) for line in str(self).splitlines())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = list(self._table_rows())
        columns = max(map(len, rows), default=1)
        return f"<table>{''.join(_html_row(row, columns) for row in rows)}</table>"


def _html_row(row: Row, columns: int) -> str:
    if len(row) == 1:
        return f'<tr><td colspan="{columns}" style="{STYLE}; font-family: monospace">{escape(row[0])}</td></tr>'
    cells = (f'<td style="{STYLE}">{escape(cell)}</td>' for cell in row)
    return f"<tr>{''.join(cells)}</tr>"
