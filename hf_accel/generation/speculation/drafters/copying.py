"""Drafts that repeat what stands in the text already."""

from __future__ import annotations

from collections.abc import Sequence


def copy_from(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on. At the text's end the copy goes on with itself, as in LZ77: what has repeated
    with a period of len(tokens) - start is expected to go on repeating.
    """
    found = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(found) < count:
        found += found[len(found) - period : len(found) - period + count - len(found)]
    return found
