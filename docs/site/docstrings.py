"""Docstrings for the site: lines such as `weights: "int8" (default), ...` become the items of a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

# A name or several, with a colon and text behind it, at the beginning of a line: an argument or a field.
ITEM = re.compile(r"^([a-z_][A-Za-z0-9_]*(?:(?:, | and )[a-z_][A-Za-z0-9_]*)*): (?=\S)")


class ListedArguments(griffe.Extension):
    """The source stays plain text, which help() shows; Markdown would run its lines together."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """The text with its items in Markdown; indented lines belong to the item above them, or are code."""
    lines: list[str] = []
    is_item = False
    for line in text.splitlines():
        match = ITEM.match(line)
        if match:
            names = ", ".join(f"`{name}`" for name in re.split(", | and ", match[1]))
            if lines and not is_item and lines[-1]:
                lines.append("")
            line = f"* {names}: {line[match.end() :]}"
            is_item = True
        elif is_item and line and not line.startswith(" "):
            lines.append("") if lines[-1] else None
            is_item = False
        lines.append(line)
    return "\n".join(lines)
