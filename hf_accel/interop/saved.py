"""What was written for other programs, and what it does not keep of the patched model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..plan import Line, table


@dataclass(frozen=True)
class Saved:
    """What save_compressed or save_gguf wrote. print() it: a line for each kind of tensor, and what is lost.

    path: the folder or the file. bytes: of all its tensors.
    """

    path: Path
    bytes: int
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        size = Line("bytes", "tensors", f"{self.bytes / 1e6:,.1f} MB", "")
        return "\n".join([f"hf_accel saved: {self.path}", *table([*self.lines, size])])
