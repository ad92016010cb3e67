"""Trees of drafted tokens over pages.

A tree is computed as branches. The first holds the likeliest tokens, in the blocks of the sequence. Each other one has
a fork of these, so that attention sees its own tokens alone and rounds them as it rounds decoded ones. A fork computes
those tokens that no branch before it has; the pass writes K and V of the others for each branch that has them. When a
branch is accepted, the sequence goes on with its blocks, and nothing moves.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from ...cache.cached_sequence import CachedSequence
from ...cache.pages import Pages
from ...cache.step import TokenRange
from ...errors import HfAccelError
from ..sequence import Chunk, Draft, Sequence, Shape


@dataclass
class Fork:
    """A branch of a draft with blocks of its own.

    copied: the rows of the draft that lead to it, which other branches compute. rows: those that it computes.
    """

    cached: CachedSequence
    copied: list[int]
    rows: range


def in_branches(draft: Draft, shape: Shape, name: str) -> Draft:
    """Return the draft with its tokens in the order of branches: each is followed by its first child, if it has any.

    Raises HfAccelError for a draft that is larger than `shape`, or is no tree. name: of the drafter.
    """
    parents = draft.parents
    if parents is not None and (
        len(parents) != len(draft) or not all(-1 <= each < index for index, each in enumerate(parents))
    ):
        raise HfAccelError(
            f"the drafter {name!r} proposed {len(draft)} tokens with parents={parents}; give each token the index of "
            "one before it, or -1"
        )
    if len(draft) > shape.nodes or draft.num_levels > shape.depth:
        raise HfAccelError(
            f"the drafter {name!r} proposed {len(draft)} tokens where {shape.nodes} were asked for, "
            f"{draft.num_levels} of them after each other where {shape.depth} were; propose at most as many"
        )
    if parents is None:
        return draft
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(parents):
        children.setdefault(parent, []).insert(0, index)
    order, waiting = list[int](), children.get(-1, [])
    while waiting:
        order.append(waiting.pop())
        waiting += children.get(order[-1], [])
    draft = draft.kept(order)
    return Draft(draft.tokens, draft.probabilities, draft.source) if draft.is_chain else draft


def branches(draft: Draft) -> list[range]:
    """Return the rows of each branch of a draft in the order of branches; row 0 is in none."""
    parents = draft.parents or ()
    starts = [index + 1 for index, parent in enumerate(parents) if index and parent != index - 1]
    ends = [*starts, len(draft) + 1]
    return [range(start, end) for start, end in zip([1, *starts], ends, strict=True)]


def first_branch(draft: Draft) -> int:
    """Return the number of tokens of the first branch."""
    return len(draft.tokens) if draft.parents is None else len(branches(draft)[0])


def fork_branches(cached: CachedSequence, draft: Draft, start: int, pages: Pages) -> tuple[Draft, list[Fork]]:
    """Give each branch but the first blocks of its own. Returns the draft of the branches for which there are blocks.

    cached: the sequence, whose first `start` tokens are computed. draft: in the order of branches.
    """
    forks = list[Fork]()
    if draft.parents is None:
        return draft, forks
    for rows in branches(draft)[1:]:
        copied = draft.line(rows.start)[:-1]
        fork = _forked(cached, start, len(copied) + len(rows), pages)
        if fork is None:
            return draft.kept(list(range(rows.start - 1))), forks
        forks.append(Fork(fork, copied, rows))
    return draft, forks


def _forked(cached: CachedSequence, start: int, count: int, pages: Pages) -> CachedSequence | None:
    """Return a fork of a sequence with slots for `count` tokens behind the first `start`; None if blocks run out."""
    fork = cached.fork()
    try:
        fork.truncate(start)
        if pages.room(fork, count, start=start) == count:
            pages.append(fork, count, start=start)
            return fork
    except (MemoryError, RuntimeError):  # torch raises RuntimeError when it cannot allocate memory
        pass
    fork.release()
    return None


def pass_ranges(chunk: Chunk, draft: Draft, forks: abc.Sequence[Fork], first: int) -> list[TokenRange]:
    """Return the tokens that a pass computes of a sequence: its chunk with the first branch of its draft, and then
    each fork. first: the index of the chunk's first token in the pass.
    """
    sequence, start = chunk.sequence, chunk.sequence.num_computed
    count = chunk.count + len(draft.tokens) - sum(len(fork.rows) for fork in forks)
    ranges = [_range(sequence, sequence.cached, start, count)]
    last = chunk.count - 1  # row 0 is the last token of the chunk
    for fork in forks:
        copied = [first + last + row for row in fork.copied]
        ranges.append(_range(sequence, fork.cached, start + last + len(copied), len(fork.rows), copied=copied))
    return ranges


def _range(
    sequence: Sequence, cached: CachedSequence | None, start: int, count: int, *, copied: abc.Sequence[int] = ()
) -> TokenRange:
    assert cached is not None
    given, prompt = sequence.prompt_inputs, sequence.num_prefilled
    if given is None:
        return TokenRange(cached, start, count, num_prompt=prompt, copied=copied)
    seen, in_windows = given.seen_by(start, count), given.seen_in_windows
    return TokenRange(cached, start, count, num_prompt=prompt, seen=seen, seen_in_windows=in_windows, copied=copied)
