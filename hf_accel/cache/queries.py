"""The runs of tokens of a pass that attend causally, where some of them see later ones."""

from __future__ import annotations

from collections.abc import Sequence


def chunks_of(start: int, count: int, chunk: int) -> list[tuple[int, int, int]]:
    """Return the tokens start..start+count-1 by the chunks that they stand in: (tokens, the chunk's first token, the
    end of the tokens)."""
    firsts = range(start // chunk * chunk, start + count, chunk)
    parts = [(first, min(first + chunk, start + count)) for first in firsts]
    return [(stop - max(first, start), first, stop) for first, stop in parts]


def runs_of(start: int, count: int, seen: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return the runs of tokens that attend causally to the first tokens of their sequence: (tokens, attended to).

    A token that sees later ones is a run of its own. start, count: the tokens. seen: for each of them, how many of the
    sequence's first tokens it attends to; None if to those up to itself.
    """
    if seen is None:
        return [(count, start + count)]
    runs: list[tuple[int, int]] = []
    for index, attended in enumerate(seen, start=start + 1):
        grows = bool(runs) and attended == index and runs[-1][1] == index - 1
        runs[-1:] = [(runs[-1][0] + 1, index)] if grows else [*runs[-1:], (1, attended)]
    return runs
