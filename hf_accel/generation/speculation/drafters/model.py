"""Drafts that a model generates: a small model with its own pages, or a quantized target that shares its pages."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....cache.cached_sequence import CachedSequence
from ....cache.pages import Pages
from ....cache.step import TokenRange
from ....tensors import Unread, all_unread, integers, is_remote, sent
from ...batcher import Runner
from ...sampling.choice import likeliest, processed
from ...sequence import Draft, Sequence
from ..verifiers.verifier import Place, Verifier
from .drafter import Drafter

MAX_CHUNK = 512  # the most tokens of one sequence in a pass of catch_up()
# The first drafting pass computes up to so many tokens of a sequence: when a whole draft was accepted, its last token
# and the bonus token are not computed yet.
MAX_MISSING = 2
UNREAD = -1  # stands for a drafted token that the host has not read


@dataclass
class Past:
    """The tokens whose K and V the draft model has computed: `final` tokens of the sequence, and then `drafted`."""

    cached: CachedSequence
    final: int = 0
    drafted: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.final + len(self.drafted)


@dataclass
class PartialDraft:
    """A draft of `length` tokens that is being generated.

    distributions: [V] float32 for each token, the distribution that it was drawn from; empty for greedy tokens.
    """

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
        """The number of tokens that the draft model has not computed."""
        return len(self.sequence.tokens) + len(self.tokens) - self.past.count

    @property
    def distribution(self) -> Tensor | None:
        return torch.stack(self.distributions) if self.distributions else None

    def next_inputs(self, count: int) -> list[int]:
        """Return the next `count` tokens to compute. They count as computed from now on."""
        start, end = self.past.count, len(self.sequence.tokens)
        final = self.sequence.tokens[start : start + count]
        drafted = self.tokens[max(0, start - end) : start + count - end] if start + count > end else []
        self.past.final += len(final)
        self.past.drafted += drafted
        return final + drafted


class ModelDrafter(Drafter):
    """Drafts token by token with a model. Each pass drafts one token for all sequences.

    On a device a pass takes the tokens of the one before from there, and the host reads all of them at the end, unless
    a logits processor has to see them.

    runner: calls the draft model. pages: the draft model's own pages, or None if it reads and writes the target's. In
        that case its K and V are in the slots of the drafted tokens until the target overwrites them.
    num_tokens, target_tokens: the vocabulary sizes of the draft model and of the target. Their common ids mean the
        same tokens. Ids that only the target has are replaced by 0 in the draft model's input: this may lower the
        acceptance, but the output stays exact.
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
        """Compute all but the last token of sequences that miss more than MAX_MISSING, MAX_CHUNK tokens per pass."""
        drafts = [PartialDraft(sequence, self._past(sequence), 0) for sequence in sequences]
        behind = [draft for draft in drafts if draft.missing > MAX_MISSING]
        while behind := [draft for draft in behind if draft.missing > 1]:
            self._pass(behind, [min(draft.missing - 1, MAX_CHUNK) for draft in behind])

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        self.catch_up(sequences)
        ahead = not any(sequence.settings.sampling.uses_prefix for sequence in sequences)
        drafts = self._drafted(sequences, lengths, ahead=ahead) or self._drafted(sequences, lengths, ahead=False)
        return [Draft(draft.tokens, draft.distribution) for draft in drafts]

    def _drafted(
        self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int], *, ahead: bool
    ) -> list[PartialDraft]:
        """Generate the drafts. Returns [] if a pass went on from a token that had to be drawn again.

        ahead: whether the host reads the tokens of a device at the end only.
        """
        drafts = [PartialDraft(s, self._past(s), length) for s, length in zip(sequences, lengths, strict=True)]
        longest_first = sorted(drafts, key=lambda draft: -draft.length)  # those that go on are then the first rows
        passes: list[Unread[list[list[int]]]] = []
        ids: Tensor | None = None
        for number in range(max(lengths, default=0)):
            unfinished = [draft for draft in longest_first if draft.length > number]
            logits = self._pass(unfinished, [draft.missing for draft in unfinished], ids)
            chosen, right = self._next_tokens(unfinished, self._over_target_vocabulary(logits))
            if ahead and is_remote(logits):
                ids = chosen
                passes.append(all_unread([Unread(chosen, list), right]))
                tokens = [UNREAD] * len(unfinished)
            else:
                tokens = right.read()
            for draft, token in zip(unfinished, tokens, strict=True):
                draft.tokens.append(token)
        for number, (used, read) in enumerate(all_unread(passes).read()):
            if used != read:
                return []
            for draft, token in zip(longest_first, read, strict=False):
                draft.tokens[number] = token
        for draft in drafts:
            draft.past.drafted = draft.tokens[: len(draft.past.drafted)]
        return drafts

    def forget(self, sequence: Sequence) -> None:
        past = self._pasts.pop(sequence, None)
        if past is not None:
            past.cached.release()

    # -- computed tokens -------------------------------------------------------------------------------

    def _past(self, sequence: Sequence) -> Past:
        """Return the computed tokens of a sequence, after rejected drafted tokens are removed."""
        if self.is_shared:
            assert sequence.cached is not None
            return Past(sequence.cached, final=sequence.num_computed)
        past = self._pasts.get(sequence)
        if past is None:
            cached = self.pages.begin_with_prefix(self._in_vocabulary(sequence.tokens))
            past = self._pasts[sequence] = Past(cached, final=cached.num_tokens)
        for token in past.drafted:
            if past.final >= len(sequence.tokens) - 1 or sequence.tokens[past.final] != token:
                break
            past.final += 1
        past.drafted = []
        past.final = min(past.final, len(sequence.tokens) - 1)  # it has all of them where a draft is made again
        past.cached.truncate(past.final)
        return past

    def _in_vocabulary(self, tokens: list[int]) -> list[int]:
        size = self.num_tokens
        return tokens if size >= self.target_tokens else [token if token < size else 0 for token in tokens]

    # -- a pass ----------------------------------------------------------------------------------------

    def _pass(self, drafts: list[PartialDraft], counts: list[int], last: Tensor | None = None) -> Tensor:
        """Compute the next counts[i] tokens of each draft; returns the logits [n, num_tokens] of its last token.

        last: the tokens of the pass before, on the device, where the host has not read them; one is missing then.
        """
        ids: list[int] = []
        positions: list[int] = []
        ranges, keep = [], []
        for draft, count in zip(drafts, counts, strict=True):
            start, cached = draft.past.count, draft.past.cached
            if not self.is_shared:
                # Drafted tokens may be taken back: the token after the final ones must then find what it needs.
                self.pages.append(cached, count, start=draft.past.final)
            ranges.append(TokenRange(cached, start, count))
            ids += self._in_vocabulary(draft.next_inputs(count))
            positions += range(start, start + count)
            keep.append(len(ids) - 1)
        given = ids if last is None else last[: len(drafts)]
        return self.runner(given, positions, self.pages.step(ranges), keep)

    # -- tokens ----------------------------------------------------------------------------------------

    def _next_tokens(self, drafts: list[PartialDraft], logits: Tensor) -> tuple[Tensor, Unread[list[int]]]:
        """The next token of each draft: the most probable one for greedy sequences, a drawn one for others.

        logits: [n, target_tokens], processed here as the target's are. Returns the tokens [n] as they are on the
        device, and as they are right: the rare ones that must be drawn again are known only when they are read.
        """
        if all(draft.sequence.settings.sampling.plain for draft in drafts):
            best = likeliest(logits)
            return best, Unread(best, list)
        distributions = processed(logits, [(draft.sequence, draft.tokens) for draft in drafts])
        best = likeliest(distributions)
        rows = [row for row, draft in enumerate(drafts) if not draft.sequence.settings.sampling.greedy]
        if not rows:
            return best, Unread(best, list)
        at = sent(integers(rows), best)
        drawn = self.verifier.drawn(distributions[at], [drafts[row].place for row in rows])
        for row in rows:
            drafts[row].distributions.append(distributions[row])
        if len(drawn.numbers):
            best = best.index_copy(0, at, drawn.numbers[: len(rows)])

        def merged(read: list[list[int]]) -> list[int]:
            tokens = dict(enumerate(read[0])) | dict(zip(rows, read[1], strict=True))
            return list(tokens.values())

        return best, all_unread([Unread(best, list), drawn]).then(merged)

    def _over_target_vocabulary(self, logits: Tensor) -> Tensor:
        """Convert logits [n, num_tokens] to [n, target_tokens], with -inf for tokens that only the target has."""
        shared = min(self.num_tokens, self.target_tokens, logits.shape[1])
        if shared == logits.shape[1] == self.target_tokens:
            return logits
        wide = logits.new_full((len(logits), self.target_tokens), float("-inf"))
        wide[:, :shared] = logits[:, :shared]
        return wide
