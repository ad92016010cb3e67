"""The chunks within which tokens attend, where a model has some (Llama 4)."""

from __future__ import annotations


def chunks_of(start: int, count: int, chunk: int) -> list[tuple[int, int, int]]:
    """Return the tokens start..start+count-1 by the chunks that they stand in: (tokens, the chunk's first token, the
    end of the tokens)."""
    firsts = range(start // chunk * chunk, start + count, chunk)
    parts = [(first, min(first + chunk, start + count)) for first in firsts]
    return [(stop - max(first, start), first, stop) for first, stop in parts]
