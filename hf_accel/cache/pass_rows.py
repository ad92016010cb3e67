"""Passes over pages that no session runs: some tokens of some sequences in each, for trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .cached_sequence import CachedSequence
from .pages import Pages
from .step import Step, TokenRange

Passes = Sequence[Sequence[tuple[int, int]]]  # the sequences of each pass, and how many tokens it computes of each
Parts = Sequence[tuple[int, range]]  # the sequences of one pass, and which of their tokens it computes


def rows_of_passes(
    pages: Pages,
    sequences: Sequence[CachedSequence],
    passes: Passes,
    compute: Callable[[Parts, Step], Tensor],
    *,
    whole: bool = False,
) -> list[Tensor]:
    """Compute passes, the tokens of each end to end, and return what they gave of each sequence in turn.

    compute: computes a pass, [N, ...] for its N tokens. whole: whether the tokens of a sequence's first pass see each
    other. Returns a tensor [n, ...] for each sequence and pass with n of its tokens.
    """
    found: list[list[Tensor]] = [[] for _ in sequences]
    for counts in passes:
        ranges = []
        for number, count in counts:
            start = sequences[number].num_tokens
            pages.append(sequences[number], count)
            seen = [count] * count if whole and not start else None
            ranges.append(TokenRange(sequences[number], start, count, seen=seen))
        parts = [(number, each.span) for (number, _), each in zip(counts, ranges, strict=True)]
        rows = compute(parts, pages.step(ranges)).split_with_sizes([each.count for each in ranges])
        for (number, _), part in zip(parts, rows, strict=True):
            found[number].append(part)
    return [part for each in found for part in each]
