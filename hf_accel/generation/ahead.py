"""The pass after the running one, launched on a device before the host has read the tokens that it computes.

While the device computes, the host ends one pass and prepares the next. A pass over one token of each sequence can be
prepared without these tokens: slots and positions follow from how many tokens a sequence has. So the device takes the
tokens from its own memory. When the host has read them, the launched pass is the next one if the sequences go on as
was expected: each with one token more, in the same blocks. For a sequence that has ended, a row was computed in vain.
vLLM ("asynchronous scheduling") and SGLang ("overlap scheduler") do the same.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.cached_sequence import CachedSequence
from ..cache.group import PageGroup
from ..cache.pages import Pages
from ..cache.step import Step, TokenRange
from ..errors import OutOfBlocksError
from ..tensors import integers, sent
from .sequence import Chunk, Sequence

Place = tuple[int, CachedSequence, tuple[tuple[int, int, int], ...]]


@dataclass(frozen=True)
class Ahead:
    """A launched pass over one token of each sequence.

    places: by sequence, the row of its token, and where its K and V go. logits: [sequences, V].
    """

    places: dict[Sequence, tuple[int, Place]]
    logits: Tensor

    def taken_for(self, chunks: abc.Sequence[Chunk]) -> Tensor | None:
        """Return the logits [len(chunks), V] of these chunks; None if they are not what the pass has computed."""
        rows: list[int] = []
        for chunk in chunks:
            row, place = self.places.get(chunk.sequence, (-1, None))
            if chunk.count != 1 or not chunk.reaches_end or place != place_of(chunk.sequence):
                return None
            rows.append(row)
        return self.logits if rows == list(range(len(self.logits))) else self.logits[sent(integers(rows), self.logits)]


def place_of(sequence: Sequence) -> Place | None:
    """Return what must be as it was when a pass over the sequence's next token was launched: it has slots for it."""
    cached = sequence.cached
    if cached is None:
        return None
    tables = tuple((table.num_tokens, len(table.blocks), table.blocks[-1]) for table in cached.tables)
    return sequence.num_computed, cached, tables


def can_go_ahead(pages: Pages, sequences: abc.Sequence[Sequence]) -> bool:
    """Return whether the next pass of these sequences can be prepared without the tokens of this one.

    A recurrent state could not be taken back; other settings than greedy search may read the tokens on the host.
    """
    return all(type(group) is PageGroup and group.context is None for group in pages.groups) and all(
        each.settings.sampling.plain and each.settings.sampling.num_logprobs is None and each.inputs is None
        and each.joint is None and not each.followers and each.settings.adapter is None
        for each in sequences
    )  # fmt: skip


@dataclass(frozen=True)
class NextPass:
    """The inputs of the next pass over one token of each of these sequences. rows: of the tokens of this pass."""

    places: dict[Sequence, tuple[int, Place]]
    rows: list[int]
    positions: list[int]
    step: Step

    def ids(self, tokens: Tensor) -> Tensor:
        """tokens: of this pass, [n] int64 on the device."""
        return tokens if self.rows == list(range(len(tokens))) else tokens[sent(integers(self.rows), tokens)]


def prepared(pages: Pages, sequences: abc.Sequence[Sequence]) -> NextPass | None:
    """Prepare the next pass of those of the sequences that go on unless a token ends them; all but their next is
    computed.

    None if there are none, or no blocks for them. The slots are given back: the scheduler asks for them once more.
    """
    rows = [row for row, sequence in enumerate(sequences) if sequence.num_left > 1]
    going = [sequences[row] for row in rows]
    longer: list[CachedSequence] = []
    places: dict[Sequence, tuple[int, Place]] = {}
    try:
        ranges = []
        for number, sequence in enumerate(going):
            cached = sequence.cached
            assert cached is not None
            pages.append(cached, 1)
            longer.append(cached)
            ranges.append(TokenRange(cached, sequence.num_computed, 1))
            place = place_of(sequence)
            assert place is not None
            places[sequence] = number, place
        positions = [sequence.num_computed for sequence in going]
        return NextPass(places, rows, positions, pages.step(ranges)) if going else None
    except OutOfBlocksError:
        return None
    finally:
        for cached in reversed(longer):  # so that each gets the same block again
            cached.truncate(cached.num_tokens - 1)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
