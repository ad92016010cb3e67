"""Drafts that copy a part of the text."""

from __future__ import annotations

from collections.abc import Sequence


def copy_from(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Copy `count` tokens from index `start` on. At the end of `tokens` the copy continues with itself, as in LZ77:
    it repeats with a period of len(tokens) - start.
    """
    found = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(found) < count:
        found += found[len(found) - period : len(found) - period + count - len(found)]
    return found
