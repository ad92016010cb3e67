"""The pass after the running one, launched on a device before the host has read the tokens that it computes.

While the device computes, the host ends one pass and prepares the next. A pass over one token of each sequence can be
prepared without these tokens: slots and positions follow from how many tokens a sequence has. So the device takes the
tokens from its own memory. When the host has read them, the launched pass is the next one if the sequences go on as
was expected: each with one token more, in the same blocks. For a sequence that has ended, a row was computed in vain.
vLLM ("asynchronous scheduling") and SGLang ("overlap scheduler") do the same.
"""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache.cached_sequence import CachedSequence
from ..cache.group import PageGroup
from ..cache.pages import Pages
from ..cache.step import Step, TokenRange
from ..errors import OutOfBlocksError
from ..tensors import integers, sent
from .carried import may_carry
from .sequence import Chunk, Draft, Sequence

Where = tuple[int, CachedSequence, tuple[tuple[int, int, int], ...]]


@dataclass(frozen=True)
class NextPass:
    """The inputs of a pass over one token of each sequence.

    rows: by sequence, its row, and where K and V of its token go. taken: which of the running pass's tokens it takes.
    """

    rows: dict[Sequence, tuple[int, Where]]
    taken: list[int]
    positions: list[int]
    step: Step


class PassAhead:
    """The pass that a batcher has launched ahead, if there is one.

    runner: of its passes, over `pages`. None is launched unless its `goes_ahead` is true, nor for a token at its
    `most_positions` or behind. launched: how many were; unused: how many of them were not the next pass; failed: how
    many could not be launched, by the error.
    """

    def __init__(self, runner: Any, pages: Pages) -> None:
        self.runner, self.pages = runner, pages
        self.launched = self.unused = 0
        self.failed: Counter[str] = Counter()
        self._launched: tuple[NextPass, Tensor] | None = None  # with its logits [sequences, V]

    @property
    def is_launched(self) -> bool:
        return self._launched is not None

    def statistics(self) -> dict[str, Any]:
        return {"launched": self.launched, "unused": self.unused, "failed": dict(self.failed)}

    def logits_for(self, chunks: abc.Sequence[Chunk], drafts: abc.Sequence[Draft]) -> Tensor | None:
        """Return the logits [len(chunks), V] of the pass of these chunks; None if it was not launched. Forgets it."""
        logits = self._logits_for(chunks, drafts)
        self.unused += logits is None and self.is_launched
        self._launched = None
        return logits

    def _logits_for(self, chunks: abc.Sequence[Chunk], drafts: abc.Sequence[Draft]) -> Tensor | None:
        launched = self._launched
        if launched is None or not self._serves or any(len(draft) for draft in drafts):
            return None
        (found, logits), rows = launched, list[int]()
        for chunk in chunks:
            row, where = found.rows.get(chunk.sequence, (-1, None))
            if chunk.count != 1 or not chunk.reaches_end or where != _where(chunk.sequence):
                return None
            rows.append(row)
        return logits if rows == list(range(len(logits))) else logits[sent(integers(rows), logits)]

    def launching(self, sequences: abc.Sequence[Sequence]) -> Callable[[Tensor], None] | None:
        """Return what launches the next pass of these sequences; None if it cannot be launched, or would not pay.

        It takes their tokens of this pass, [n] int64 on the device, which the host has not read.
        """
        if not self._serves or not can_go_ahead(self.pages, sequences):
            return None
        return lambda tokens: self._launch(sequences, tokens)

    @property
    def _serves(self) -> bool:
        return bool(getattr(self.runner, "goes_ahead", False))

    def _launch(self, sequences: abc.Sequence[Sequence], tokens: Tensor) -> None:
        """Launch the next pass, or none if that raises; one that is needed is computed, and raises, in its turn."""
        try:
            given = self._prepare(sequences)
            if given is not None:
                ids = tokens if len(given.taken) == len(tokens) else tokens[sent(integers(given.taken), tokens)]
                logits = self.runner(ids, given.positions, given.step, list(range(len(ids))))
                self._launched = given, logits
                self.launched += 1
        except Exception as error:
            self.failed[type(error).__name__] += 1

    def _prepare(self, sequences: abc.Sequence[Sequence]) -> NextPass | None:
        """Prepare the next pass of those of the sequences that go on unless a token ends them.

        None if there are none, or no blocks for them. The slots are given back: the scheduler asks for them once more.
        """
        most = getattr(self.runner, "most_positions", None)  # behind them, a device would fail and not recover
        taken = [
            row
            for row, sequence in enumerate(sequences)
            if sequence.num_left > 1 and (most is None or sequence.num_computed < most)
        ]
        longer: list[CachedSequence] = []
        rows: dict[Sequence, tuple[int, Where]] = {}
        try:
            ranges = []
            for number, sequence in enumerate(sequences[row] for row in taken):
                assert sequence.cached is not None
                self.pages.append(sequence.cached, 1)
                longer.append(sequence.cached)
                ranges.append(TokenRange(sequence.cached, sequence.num_computed, 1))
                where = _where(sequence)
                assert where is not None
                rows[sequence] = number, where
            return NextPass(rows, taken, [each.start for each in ranges], self.pages.step(ranges)) if rows else None
        except OutOfBlocksError:
            return None
        finally:
            for cached in reversed(longer):  # so that each gets the same block again
                cached.truncate(cached.num_tokens - 1)

    def drop(self, *, wait: bool = False) -> None:
        """Forget the launched pass. wait: until it has ended, as what it reads and writes may be given back."""
        launched, self._launched = self._launched, None
        self.unused += launched is not None
        if wait and launched is not None:
            wait_for(self.runner.device)


def can_go_ahead(pages: Pages, sequences: abc.Sequence[Sequence]) -> bool:
    """Return whether the next pass of these sequences can be prepared without the tokens of this one.

    A recurrent state could not be taken back; other settings than greedy search may read the tokens on the host.
    """
    return all(type(group) is PageGroup for group in pages.groups) and all(
        each.settings.sampling.plain and each.settings.sampling.num_logprobs is None and each.joint is None
        and not each.followers and not may_carry(each)
        for each in sequences
    )  # fmt: skip


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what this thread has launched."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _where(sequence: Sequence) -> Where | None:
    """Return what must be as it was when a pass over the sequence's next token was launched: it has slots for it."""
    cached = sequence.cached
    if cached is None:
        return None
    tables = tuple((table.num_tokens, len(table.blocks), table.blocks[-1]) for table in cached.tables)
    return sequence.num_computed, cached, tables
