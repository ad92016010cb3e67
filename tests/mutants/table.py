"""The list of mutants, read from mutants.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TABLE = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Mutant:
    """One wrong line. name: the fault that it is. file: from the repository's root. old: text that occurs once in it,
    new: what stands there instead. tests: what pytest is given, of which at least one must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def is_native(self) -> bool:
        return self.file.endswith((".cpp", ".h"))

    def apply(self, root: Path) -> None:
        """Write it into the tree at `root`. Raises ValueError unless `old` occurs exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {count} times in {self.file}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def mutants() -> list[Mutant]:
    entries = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
