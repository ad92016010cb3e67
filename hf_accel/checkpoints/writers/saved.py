"""The report of a model that was written for other programs, and of what is lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...patching.plan import Line, Printed, Row, row_of, table


@dataclass(frozen=True, repr=False)
class Saved(Printed):
    """The report of save_compressed or save_gguf.

    print() it: a line for each kind of tensor, and what is lost. path: the folder or the file. bytes: the size of all
    its tensors.
    """

    path: Path
    bytes: int
    lines: tuple[Line, ...]

    @property
    def _all_lines(self) -> list[Line]:
        return [*self.lines, Line("bytes", "tensors", f"{self.bytes / 1e6:,.1f} MB", "")]

    def __str__(self) -> str:
        return "\n".join([f"hf_accel saved: {self.path}", *table(self._all_lines)])

    def _table_rows(self) -> Iterable[Row]:
        return [(f"hf_accel saved: {self.path}",), *map(row_of, self._all_lines)]
