"""Drafts written by a model: a small one over pages of its own, or a coarser form of the target over the target's."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...cache.rows import Pages, Row, Span
from ..acceptance.base import Place, Verifier
from ..choice import processed
from ..sequence import Sequence
from .base import Draft, Drafter

Runner = Callable[[list[int], list[int], Any, list[int]], Tensor]
MAX_CHUNK = 512  # tokens of one sequence that a pass of the draft model catches up on


@dataclass
class Past:
    """What a row of the draft model holds: `final` tokens of the sequence, and then these drafted ones."""

    row: Row
    final: int = 0
    drafted: list[int] = field(default_factory=list)


@dataclass
class Growing:
    """A draft that is being written."""

    sequence: Sequence
    past: Past
    length: int
    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)

    @property
    def place(self) -> Place:
        return Place(self.sequence.seed, len(self.sequence.tokens) + len(self.tokens))


class ModelDrafter(Drafter):
    """Autoregressive drafts, all sequences in one pass a token.

    runner: of the draft model. pages: its own, or None if it reads and writes the target's: then its K and V stand in
    the slots of the drafted tokens until the target's overwrite them.
    num_tokens: the size of its vocabulary, of which the first min(num_tokens, target's) ids are the target's; what
    the target alone knows is fed as id 0, which costs acceptance and never exactness.
    """

    name = "draft model"

    def __init__(
        self,
        runner: Any,
        pages: Pages | None,
        verifier: Verifier,
        *,
        target_pages: Pages,
        num_tokens: int,
        target_tokens: int,
    ) -> None:
        self.runner, self.verifier = runner, verifier
        self.is_shared = pages is None
        self.pages = target_pages if pages is None else pages
        self.num_tokens, self.target_tokens = num_tokens, target_tokens
        self._pasts: dict[Sequence, Past] = {}

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        drafts = [
            Growing(sequence, self._past(sequence), length)
            for sequence, length in zip(sequences, lengths, strict=True)
        ]
        for number in range(max(lengths, default=0)):
            growing = [draft for draft in drafts if draft.length > number]
            self._grow(growing, self._logits(growing))
        return [Draft(d.tokens, self._law(d)) for d in drafts]

    def forget(self, sequence: Sequence) -> None:
        past = self._pasts.pop(sequence, None)
        if past is not None:
            past.row.release()

    # -- what the draft model has seen -----------------------------------------------------------------

    def _past(self, sequence: Sequence) -> Past:
        """The sequence's row, without the drafted tokens that were rejected."""
        if self.is_shared:
            assert sequence.row is not None
            return Past(sequence.row, final=sequence.num_computed)
        past = self._pasts.get(sequence)
        if past is None:
            row = self.pages.open(self._known(sequence.tokens))
            past = self._pasts[sequence] = Past(row, final=row.num_tokens)
        for token in past.drafted:
            if past.final >= len(sequence.tokens) - 1 or sequence.tokens[past.final] != token:
                break
            past.final += 1
        past.drafted = []
        past.row.truncate(past.final)
        return past

    def _known(self, tokens: list[int]) -> list[int]:
        size = self.num_tokens
        return tokens if size >= self.target_tokens else [token if token < size else 0 for token in tokens]

    # -- a pass ----------------------------------------------------------------------------------------

    def _logits(self, drafts: list[Growing]) -> Tensor:
        """Of the next token of each, [n, num_tokens]; first those tokens are computed that the draft model missed."""
        while any(self._missing(draft) > MAX_CHUNK for draft in drafts):
            self._pass([draft for draft in drafts if self._missing(draft) > MAX_CHUNK], MAX_CHUNK)
        return self._pass(drafts, MAX_CHUNK)

    def _missing(self, draft: Growing) -> int:
        return len(draft.sequence.tokens) + len(draft.tokens) - draft.past.final - len(draft.past.drafted)

    def _pass(self, drafts: list[Growing], most: int) -> Tensor:
        ids: list[int] = []
        positions: list[int] = []
        spans, keep = [], []
        for draft in drafts:
            past = draft.past
            start = past.final + len(past.drafted)
            fed = self._feed(draft, start, most)
            if not self.is_shared:
                self.pages.append(past.row, len(fed))
            spans.append(Span(past.row, start, len(fed)))
            ids += fed
            positions += range(start, start + len(fed))
            keep.append(len(ids) - 1)
        return self.runner(ids, positions, self.pages.step(spans, self.runner.device), keep)

    def _feed(self, draft: Growing, start: int, most: int) -> list[int]:
        """The next tokens to compute, which then count as past."""
        tokens, past = draft.sequence.tokens, draft.past
        final = tokens[start : start + most]
        drafted = draft.tokens[max(0, start - len(tokens)) :] if len(final) < most else []
        past.final += len(final)
        past.drafted += drafted
        return self._known(final + drafted)

    # -- tokens ----------------------------------------------------------------------------------------

    def _grow(self, drafts: list[Growing], logits: Tensor) -> None:
        """Greedy sequences get the likeliest token; others draw from the law that they sample the target's from."""
        logits = self._widened(logits)
        laws = processed(logits, [(draft.sequence, draft.tokens) for draft in drafts])
        likeliest = laws.argmax(-1).tolist()
        sampled = [i for i, draft in enumerate(drafts) if not draft.sequence.sampling.greedy]
        if sampled:
            drawn = self.verifier.draw(laws[sampled], [drafts[i].place for i in sampled])
            for i, token in zip(sampled, drawn, strict=True):
                likeliest[i] = token
                drafts[i].laws.append(laws[i])
        for draft, token in zip(drafts, likeliest, strict=True):
            draft.tokens.append(token)

    def _widened(self, logits: Tensor) -> Tensor:
        """[n, num_tokens] as logits over the target's vocabulary."""
        shared = min(self.num_tokens, self.target_tokens, logits.shape[1])
        if shared == logits.shape[1] == self.target_tokens:
            return logits
        wide = logits.new_full((len(logits), self.target_tokens), float("-inf"))
        wide[:, :shared] = logits[:, :shared]
        return wide

    @staticmethod
    def _law(draft: Growing) -> Tensor | None:
        return torch.stack(draft.laws) if draft.laws else None
