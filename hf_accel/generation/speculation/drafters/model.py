"""Drafts written by a model: a small one over pages of its own, or a coarser form of the target over the target's."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....cache.pages import CachedSequence, Pages, TokenRange
from ...runner import Runner
from ...sampling.choice import argmax, processed
from ...sequence import Draft, Sequence
from ..verifiers.verifier import Place, Verifier
from .drafter import Drafter

MAX_CHUNK = 512  # tokens of one sequence that a pass of the draft model catches up on
TOGETHER = (
    2  # tokens that the first drafting pass computes at once: a whole accepted draft leaves its last and the bonus
)


@dataclass
class Past:
    """What the draft model's pages hold of a sequence: `final` tokens of the sequence, and then these drafted ones."""

    cached: CachedSequence
    final: int = 0
    drafted: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.final + len(self.drafted)


@dataclass
class Growing:
    """A draft that is being written. distributions: what each of its tokens was drawn from, if they were drawn."""

    sequence: Sequence
    past: Past
    length: int
    tokens: list[int] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)

    @property
    def place(self) -> Place:
        return Place(self.sequence.seed, len(self.sequence.tokens)).next(len(self.tokens))

    @property
    def missing(self) -> int:
        """Tokens that the draft model has not computed."""
        return len(self.sequence.tokens) + len(self.tokens) - self.past.count

    @property
    def distribution(self) -> Tensor | None:
        return torch.stack(self.distributions) if self.distributions else None

    def take(self, count: int) -> list[int]:
        """The next tokens to compute, as past from now on."""
        start, end = self.past.count, len(self.sequence.tokens)
        final = self.sequence.tokens[start : start + count]
        drafted = self.tokens[max(0, start - end) : start + count - end] if start + count > end else []
        self.past.final += len(final)
        self.past.drafted += drafted
        return final + drafted


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
        runner: Runner,
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

    def catch_up(self, sequences: abc.Sequence[Sequence]) -> None:
        """Compute all but the last token of those far behind; a pass for every MAX_CHUNK tokens of the longest."""
        drafts = [Growing(sequence, self._past(sequence), 0) for sequence in sequences]
        behind = [draft for draft in drafts if draft.missing > TOGETHER]
        while behind := [draft for draft in behind if draft.missing > 1]:
            self._pass(behind, [min(draft.missing - 1, MAX_CHUNK) for draft in behind])

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        self.catch_up(sequences)
        drafts = [Growing(s, self._past(s), length) for s, length in zip(sequences, lengths, strict=True)]
        for number in range(max(lengths, default=0)):
            growing = [draft for draft in drafts if draft.length > number]
            self._grow(growing, self._pass(growing, [draft.missing for draft in growing]))
        return [Draft(draft.tokens, draft.distribution) for draft in drafts]

    def forget(self, sequence: Sequence) -> None:
        past = self._pasts.pop(sequence, None)
        if past is not None:
            past.cached.release()

    # -- what the draft model has seen -----------------------------------------------------------------

    def _past(self, sequence: Sequence) -> Past:
        """The sequence's pages, without the drafted tokens that were rejected."""
        if self.is_shared:
            assert sequence.cached is not None
            return Past(sequence.cached, final=sequence.num_computed)
        past = self._pasts.get(sequence)
        if past is None:
            cached = self.pages.begin_with_prefix(self._known(sequence.tokens))
            past = self._pasts[sequence] = Past(cached, final=cached.num_tokens)
        for token in past.drafted:
            if past.final >= len(sequence.tokens) - 1 or sequence.tokens[past.final] != token:
                break
            past.final += 1
        past.drafted = []
        past.cached.truncate(past.final)
        return past

    def _known(self, tokens: list[int]) -> list[int]:
        size = self.num_tokens
        return tokens if size >= self.target_tokens else [token if token < size else 0 for token in tokens]

    # -- a pass ----------------------------------------------------------------------------------------

    def _pass(self, drafts: list[Growing], counts: list[int]) -> Tensor:
        """Compute the next counts[i] tokens of each, which then count as past -> logits [n, num_tokens] after them."""
        ids: list[int] = []
        positions: list[int] = []
        ranges, keep = [], []
        for draft, count in zip(drafts, counts, strict=True):
            start, cached = draft.past.count, draft.past.cached
            if not self.is_shared:
                self.pages.append(cached, count)
            ranges.append(TokenRange(cached, start, count))
            ids += self._known(draft.take(count))
            positions += range(start, start + count)
            keep.append(len(ids) - 1)
        return self.runner(ids, positions, self.pages.step(ranges, self.runner.device), keep)

    # -- tokens ----------------------------------------------------------------------------------------

    def _grow(self, drafts: list[Growing], logits: Tensor) -> None:
        """Greedy sequences get the likeliest token; others draw from a distribution processed as the target's is."""
        logits = self._widened(logits)
        if all(draft.sequence.sampling.plain for draft in drafts):
            tokens = argmax(logits).tolist()
        else:
            tokens = self._drawn(drafts, processed(logits, [(draft.sequence, draft.tokens) for draft in drafts]))
        for draft, token in zip(drafts, tokens, strict=True):
            draft.tokens.append(token)

    def _drawn(self, drafts: list[Growing], distributions: Tensor) -> list[int]:
        tokens: list[int] = distributions.argmax(-1).tolist()
        sampled = [i for i, draft in enumerate(drafts) if not draft.sequence.sampling.greedy]
        if sampled:
            drawn = self.verifier.draw(distributions[sampled], [drafts[i].place for i in sampled])
            for i, token in zip(sampled, drawn, strict=True):
                tokens[i] = token
                drafts[i].distributions.append(distributions[i])
        return tokens

    def _widened(self, logits: Tensor) -> Tensor:
        """[n, num_tokens] as logits over the target's vocabulary."""
        shared = min(self.num_tokens, self.target_tokens, logits.shape[1])
        if shared == logits.shape[1] == self.target_tokens:
            return logits
        wide = logits.new_full((len(logits), self.target_tokens), float("-inf"))
        wide[:, :shared] = logits[:, :shared]
        return wide
