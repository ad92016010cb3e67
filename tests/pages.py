"""The pages that users read, and the blocks of code on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
NEEDS = {"a GPU", "several processes", "a server", "a download", "an adapter"}  # what a test does not have
BLOCK = re.compile(
    r"^(?:<!-- needs: (?P<needs>[^>]+) -->\n)?```(?P<language>python|sh)\n(?P<code>.*?)^```$"
    r"(?:\n\n```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """needs: what `<!-- needs: ... -->` in the line above says, "" if nothing. shown: the text block below it."""

    language: str
    code: str
    needs: str
    shown: str


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> Iterator[Block]:
    for match in BLOCK.finditer(read(page)):
        if match["language"] == language:
            yield Block(language, match["code"], match["needs"] or "", match["shown"] or "")
