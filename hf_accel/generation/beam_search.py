"""Beam search: which continuations of a prompt's beams go on after a pass, and which are its results.

The arithmetic is that of `_beam_search` in transformers, operation by operation, so that it decides scores and ties in
the same way. Here the tokens of a beam are those of a Sequence, and a result is a chain of steps that shares its
beginning with others; so only token ids are copied in a pass, and nothing else that has the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .agreement import ProcessAgreement
from .joint_choice import JointChoice, Moves
from .sampling.filters import topk
from .sequence import Sequence as Beam

IMPOSSIBLE = -1.0e9  # transformers adds this to the score of what must not be chosen
CERTAIN = 0.1 * IMPOSSIBLE  # to a score above this, nothing was added


@dataclass(frozen=True)
class BeamSettings:
    """The settings of a beam search.

    num_candidates: how many continuations each pass looks at, among all beams of a prompt. length_penalty: a
    result's score is divided by the number of its tokens to this power. early_stopping: True, False or "never".
    samples: whether continuations are drawn, without replacement. sorts_drawn: whether those are put in the order of
    their scores. stop_ids: [n] int64, the tokens that end a beam.
    process: makes scores [N, V] of token ids [N, L] and log-probabilities [N, V], to which it may write; None leaves
    them as they are. process_keeps: whether it may keep scores that it was given or has made.
    stops: which of the beams with token ids [N, L] end, [N] bool; None if only stop_ids and the length decide.
    drops_ended: whether prompts whose results are certain are computed no longer. keeps_scores, keeps_logits: whether
    the scores and the logits of each pass are kept.
    """

    num_beams: int
    num_candidates: int
    max_new_tokens: int
    length_penalty: float
    early_stopping: bool | str
    samples: bool
    stop_ids: Tensor
    process: Callable[[Tensor, Tensor], Tensor] | None = None
    process_keeps: bool = False
    sorts_drawn: bool = False
    stops: Callable[[Tensor], Tensor] | None = None
    drops_ended: bool = True
    keeps_scores: bool = False
    keeps_logits: bool = False


class BeamStep(NamedTuple):
    """A token of a beam, the step before it (None for the first), and the number of the beam that it continues."""

    before: Any
    token: int
    beam: int


@dataclass(frozen=True)
class Hypothesis:
    """A result: its new tokens, for each the number of the beam that it continues, and its score."""

    tokens: list[int]
    beams: list[int]
    score: float


@dataclass
class _Candidates:
    """C continuations of each of P prompts, the best first. values: their scores, [P, C] float32. beams, tokens: what
    they are made of, [P, C] int64. ends: whether the beam ends there, [P, C] bool.
    """

    values: Tensor
    beams: Tensor
    tokens: Tensor
    ends: Tensor


class BeamSearch(JointChoice):
    """The search for one or many prompts, whose beams advance together. Each beam is a Sequence.

    prompts: the beams of each of P prompts. ids: [P * num_beams, L] int64, the columns of each beam that processors
    see, padding included, on the model's device. scores, logits: of each pass, [P * num_beams, V], if they are kept.
    results: of each prompt, the best first.
    """

    def __init__(self, prompts: Sequence[list[Beam]], ids: Tensor, settings: BeamSettings) -> None:
        super().__init__()
        self.settings, self._ids, self._num_prompts = settings, ids, len(prompts)
        self.results: list[list[Hypothesis]] = [[] for _ in prompts]
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self._memory: Tensor | None = None  # of the log-probabilities of a pass, for the next one
        self._num_new = 0
        # What follows is of the prompts that are still computed: their numbers, beams, and the steps and scores of
        # their beams and of their results so far.
        shape = (len(prompts), settings.num_beams)
        self._numbers = list(range(len(prompts)))
        self._prompts = [list(beams) for beams in prompts]
        self._steps: list[list[BeamStep | None]] = [[None] * settings.num_beams for _ in prompts]
        self._best_steps: list[list[BeamStep | None]] = [[None] * settings.num_beams for _ in prompts]
        self._scores = torch.zeros(shape, device=ids.device)
        self._scores[:, 1:] = IMPOSSIBLE  # all beams begin with the same text, so only the first one is continued
        self._best = torch.full(shape, IMPOSSIBLE, device=ids.device)
        self._has_ended = torch.zeros(shape, dtype=torch.bool, device=ids.device)
        self._can_improve = torch.ones((len(prompts), 1), dtype=torch.bool, device=ids.device)
        for beam in self.sequences:
            beam.joint = self

    @property
    def sequences(self) -> list[Beam]:
        return [beam for beams in self._prompts for beam in beams]

    def advance(self, logits: Tensor, agreement: ProcessAgreement) -> Moves:
        candidates = self._candidates(logits, agreement)
        self._num_new += 1
        running = candidates.values + candidates.ends.to(torch.float32) * IMPOSSIBLE
        chosen = torch.topk(running, self.settings.num_beams)[1]
        self._scores = running.gather(1, chosen)
        steps = self._continued(candidates)
        self._keep_best(candidates, steps)
        beams = self.sequences
        parents = self._go_on(candidates, steps, chosen)
        self._look_ahead()
        is_over = not bool(self._can_improve.any()) or bool(candidates.ends.all())
        is_over = is_over or (self.settings.early_stopping is True and bool(self._has_ended.all()))
        return Moves(beams, parents, self._end(is_over))

    # -- candidates ------------------------------------------------------------------------------------

    def _candidates(self, logits: Tensor, agreement: ProcessAgreement) -> _Candidates:
        settings, size = self.settings, logits.shape[1]
        logits = logits.float()
        scores = self._log_probabilities(logits)
        if settings.process is not None:
            scores = settings.process(self._ids, scores)
        if settings.keeps_logits:
            self.logits.append(logits.clone())
        if settings.keeps_scores:
            self.scores.append(scores.clone())
        scores = scores.view(-1, settings.num_beams, size)
        if settings.samples:
            values, places = self._drawn((scores + self._scores[:, :, None]).flatten(1))
        else:
            values, places = largest_sums(scores, self._scores, settings.num_candidates)
        if agreement.size > 1:  # a rank that rounds otherwise would go on with other beams
            agreed = agreement.agree((values.tolist(), places.tolist()))
            values, places = values.new_tensor(agreed[0]), places.new_tensor(agreed[1])
        beams, tokens = places // size, places % size
        return _Candidates(values, beams, tokens, self._ends(beams, tokens))

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        """Return log_softmax of logits [N, V], in memory that the next pass writes again.

        New memory of this size takes the system longer than the function takes to compute it.
        """
        if self.settings.process_keeps:
            return logits.log_softmax(-1)
        if self._memory is None or self._memory.shape != logits.shape:
            self._memory = torch.empty_like(logits)
        return torch.log_softmax(logits, -1, out=self._memory)

    def _drawn(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Draw continuations as transformers does, which draws for all prompts at once, also for those that ended."""
        probabilities = sums.new_ones((self._num_prompts, sums.shape[1]))
        probabilities[self._numbers] = sums.softmax(-1)
        places = torch.multinomial(probabilities, num_samples=self.settings.num_candidates)[self._numbers]
        values = sums.gather(1, places)
        if self.settings.sorts_drawn:
            values, order = values.sort(dim=-1, descending=True)
            places = places.gather(1, order)
        return values, places

    def _ends(self, beams: Tensor, tokens: Tensor) -> Tensor:
        """Return which continuations end their beam, [P, C] bool."""
        if self._num_new + 1 >= self.settings.max_new_tokens:
            ends = torch.ones_like(tokens, dtype=torch.bool)
        else:
            ends = torch.isin(tokens, self.settings.stop_ids)
        if self.settings.stops is None:
            return ends
        rows = beams + torch.arange(len(beams), device=beams.device)[:, None] * self.settings.num_beams
        ids = torch.cat([self._ids[rows.flatten()], tokens.reshape(-1, 1)], dim=1)
        return ends | self.settings.stops(ids).view_as(ends)

    def _continued(self, candidates: _Candidates) -> list[list[BeamStep]]:
        """Return the step that each candidate is."""
        found = []
        size = self.settings.num_beams
        rows = zip(self._numbers, self._steps, candidates.beams.tolist(), candidates.tokens.tolist(), strict=True)
        for number, steps, beams, tokens in rows:
            pairs = zip(beams, tokens, strict=True)
            found.append([BeamStep(steps[beam], token, number * size + beam) for beam, token in pairs])
        return found

    # -- beams that go on, and results -----------------------------------------------------------------

    def _go_on(self, candidates: _Candidates, steps: list[list[BeamStep]], chosen: Tensor) -> list[Beam]:
        """Continue the beams by the chosen candidates, [P, num_beams]. Returns the beam that each continues."""
        sources, tokens = candidates.beams.gather(1, chosen), candidates.tokens.gather(1, chosen)
        rows = sources + torch.arange(len(sources), device=sources.device)[:, None] * self.settings.num_beams
        self._ids = torch.cat([self._ids[rows.flatten()], tokens.reshape(-1, 1)], dim=1)
        self._steps = [[own[place] for place in places] for own, places in zip(steps, chosen.tolist(), strict=True)]
        beams = self.sequences
        parents = [beams[row] for row in rows.flatten().tolist()]
        texts = [parent.tokens for parent in parents]
        for beam, text, token in zip(beams, texts, tokens.flatten().tolist(), strict=True):
            beam.tokens = [*text, token]
        return parents

    def _keep_best(self, candidates: _Candidates, steps: list[list[BeamStep]]) -> None:
        """Take candidates that end among the results, where they are better than those so far."""
        settings, count = self.settings, self.settings.num_beams
        # The others are there so that enough beams go on; they cannot be results.
        first = torch.arange(settings.num_candidates, device=candidates.ends.device) < count
        ended = candidates.ends & first
        values = candidates.values / (self._num_new**settings.length_penalty)
        is_full = self._has_ended.all(-1, keepdim=True) & (settings.early_stopping is True)
        values += is_full.to(torch.float32) * IMPOSSIBLE
        values += (~self._can_improve).to(torch.float32) * IMPOSSIBLE
        values += (~ended) * IMPOSSIBLE
        merged = torch.cat([self._best, values], dim=1)
        best = torch.topk(merged, count)[1]
        self._best = merged.gather(1, best)
        self._has_ended = torch.cat([self._has_ended, ended], dim=1).gather(1, best)
        rows = zip(self._best_steps, steps, best.tolist(), strict=True)
        self._best_steps = [
            [own[place] if place < count else new[place - count] for place in places] for own, new, places in rows
        ]

    def _look_ahead(self) -> None:
        """Note which prompts may still get better results. Once one may not, it never may again."""
        settings, length = self.settings, self._num_new
        if settings.early_stopping == "never" and settings.length_penalty > 0.0:
            length = settings.max_new_tokens
        possible = self._scores[:, :1] / (length**settings.length_penalty)
        worst = torch.where(self._has_ended, self._best.amin(1, keepdim=True), IMPOSSIBLE)
        self._can_improve = self._can_improve & (possible > worst).any(-1, keepdim=True)

    def _end(self, is_over: bool) -> list[Beam]:
        """Store the results of prompts that are computed no longer, and return their beams."""
        certain = ~self._can_improve[:, 0]
        if self.settings.early_stopping is True:
            certain = certain | self._has_ended.all(-1)
        # What was added to a score makes it so low that later candidates may still take its place.
        certain = certain & (self._best > CERTAIN).all(-1) & self._has_ended.all(-1) & self.settings.drops_ended
        is_certain = [True] * len(certain) if is_over else certain.tolist()
        if not any(is_certain):
            return []
        scores, ended = self._best.tolist(), []
        for at, ends in enumerate(is_certain):
            if ends:
                pairs = zip(self._best_steps[at], scores[at], strict=True)
                self.results[self._numbers[at]] = [_hypothesis(*pair) for pair in pairs]
                ended += self._prompts[at]
        self._drop([at for at, ends in enumerate(is_certain) if not ends])
        return ended

    def _drop(self, kept: list[int]) -> None:
        """Go on with these prompts alone."""
        places = torch.tensor(kept, dtype=torch.int64, device=self._ids.device)
        self._numbers, self._prompts = [self._numbers[at] for at in kept], [self._prompts[at] for at in kept]
        self._steps, self._best_steps = [self._steps[at] for at in kept], [self._best_steps[at] for at in kept]
        self._scores, self._best = self._scores[places], self._best[places]
        self._has_ended, self._can_improve = self._has_ended[places], self._can_improve[places]
        self._ids = self._ids.view(-1, self.settings.num_beams, self._ids.shape[1])[places].flatten(0, 1)


def largest_sums(scores: Tensor, before: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return torch.topk of the sums of scores [P, K, V] and [P, K], for each of P prompts, [P, count].

    Its order of equal sums is torch's, which is no rule: where the largest sums of a prompt are not all different,
    torch looks at all of them. Else they are found among the largest scores of each beam.
    """
    size = scores.shape[2]
    if count < size:
        values, tokens = topk(scores.flatten(0, 1), count + 1)
        sums = (values.view(*scores.shape[:2], -1) + before[:, :, None]).flatten(1)
        best, places = torch.topk(sums, count + 1)
        if bool((best[:, 1:] < best[:, :-1]).all()):
            beams = places[:, :-1] // (count + 1)
            return best[:, :-1], beams * size + tokens.view(len(sums), -1).gather(1, places[:, :-1])
    values, places = torch.topk((scores + before[:, :, None]).flatten(1), count)
    return values, places


def _hypothesis(step: BeamStep | None, score: float) -> Hypothesis:
    tokens: list[int] = []
    beams: list[int] = []
    while step is not None:
        tokens.append(step.token)
        beams.append(step.beam)
        step = step.before
    return Hypothesis(tokens[::-1], beams[::-1], score)
