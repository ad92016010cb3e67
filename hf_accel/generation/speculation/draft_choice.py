"""The choice of what a source drafts in a pass, which is what pays, a trial, or nothing."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any

from ..sequence import NO_SHAPE, Sequence, Shape
from .costs import CostTable, allocate_trees
from .draft_sources import SIBLINGS, DraftPlan, DraftSource, Trees, expected_trees, hoped_trees
from .drafters.drafter import UNKNOWN

SHARE = 0.02  # of all time, what trials may lose
REPLAN = 4  # the passes for which a plan holds that drafts
# The passes after which two without drafts show again what such a pass costs; fewer where drafts gain little, so that
# nothing is lost but FORGONE of the time.
REFRESH, FORGONE = 128, 0.01
APART = 3  # the passes from one trial that did not pay to the next, where there is hope
LEAST_GAIN = 0.01  # what drafts must be expected to gain, in passes: less would not pay for mistaking it
UNMEASURED = 0.3  # the assumed time in which a model drafts or reads before any was measured, in the target's passes


@dataclass
class DraftChoice:
    """bounds: the most tokens of each sequence that follow each other. rows: of the pass, besides drafted tokens. now:
    the number of the pass. room: the most drafted tokens of it. most_nodes: the most tokens of a tree; 0 for chains.
    """

    source: DraftSource
    sequences: abc.Sequence[Sequence]
    bounds: list[int]
    rows: int
    costs: CostTable
    now: int
    room: int
    most_nodes: int

    def __post_init__(self) -> None:
        self.records = [self.source.at(sequence, self.now) for sequence in self.sequences]
        pairs = zip(self.sequences, self.records, strict=True)
        self.unread = [record.ahead(sequence) for sequence, record in pairs]

    def plan(self, horizon: int, budget: float) -> DraftPlan:
        """Return the plan with the most new tokens a second, or a trial if it drafts nothing and the budget, in
        seconds, pays for one. horizon: the passes in which drafts must pay for reading sequences.
        """
        source = self.source
        # What nothing is known of is not trusted before one of its tokens was accepted; what was trained is, with one
        # token, which counts as a trial.
        is_proved = any(source.tally.accepted)
        shapes, gained = list[Shape](), 0.0
        if is_proved or source.expected > UNKNOWN:
            shapes, gained = self._paying(horizon, self.costs.step(self.rows, self.room) if is_proved else 1)
        if not any(shape.nodes for shape in shapes):
            return self._trial(horizon, budget)
        if not is_proved:
            return self._plan(shapes, 1, is_trial=True)
        source.last_paid = self.now
        refresh = 2 * gained / (FORGONE * self.costs.seconds(len(self.sequences)))
        if self.now < source.last_bare + min(REFRESH, max(2 * REPLAN, refresh)):
            wide = self.rows + sum(shape.nodes for shape in shapes)
            return self._plan(shapes, REPLAN if self.costs.is_known(wide) else 1)
        source.last_bare = self.now + 1
        return self._plan([NO_SHAPE] * len(shapes), 2)

    def _paying(self, horizon: int, room: int) -> tuple[list[Shape], float]:
        """Return the drafts that are expected to gain most, and the seconds that they gain."""
        nodes = min(self.most_nodes, SIBLINGS * max(1, room // len(self.records)))
        trees = expected_trees(self.source, self.records, self.bounds, nodes)
        shapes, gained = self._best(trees, room)
        if gained * horizon < self._reading(self._unread(shapes)):
            read = [[] if unread else tree for tree, unread in zip(trees, self.unread, strict=True)]
            shapes, gained = self._best(read, room)
        return shapes, gained

    def _has_hope(self, horizon: int) -> bool:
        """Return whether drafts would pay, reading included, if as many were accepted as the counts leave possible."""
        shapes, gained = self._best(hoped_trees(self.source, self.bounds), self.room)
        return gained * horizon > self._reading(self._unread(shapes))

    def _trial(self, horizon: int, budget: float) -> DraftPlan:
        """Return a plan for one token of as many sequences as the budget pays for, those that were read first; or
        for nothing, until there can be a trial.
        """
        prices, shapes = [], [NO_SHAPE] * len(self.records)
        tried = sorted((unread, i) for i, unread in enumerate(self.unread) if self.bounds[i])
        unread, reading = 0, self.source.reading
        for count, (more, i) in enumerate(tried[: self.room], 1):
            if unread and more and reading is None:
                break
            unread += more
            prices.append(self._draft(1, count) + self.costs.extra(self.rows, count) + unread * (reading or 0.0))
            if prices[-1] > budget:
                break
            shapes[i] = Shape(1, 1)
        first = self.source.last_trial + APART if self._has_hope(horizon) else self.source.next_trial
        wait = max(1, first - self.now)
        if self.now >= first and prices[0] <= budget:
            return self._plan(shapes, 1, is_trial=True)
        afforded = (prices[0] - budget) / (SHARE * self.costs.seconds(self.rows))
        return self._plan([NO_SHAPE] * len(shapes), max(wait, int(afforded)))

    def _plan(self, shapes: list[Shape], passes: int, *, is_trial: bool = False) -> DraftPlan:
        return DraftPlan(list(self.sequences), self.rows, self.most_nodes > 0, shapes, self.now + passes, is_trial)

    def _unread(self, shapes: list[Shape]) -> int:
        pairs = zip(shapes, self.unread, strict=True)
        return sum(unread for shape, unread in pairs if shape.nodes)

    def _reading(self, tokens: int) -> float:
        """Return the seconds in which the source reads tokens before it drafts."""
        if self.source.reading is not None or self.source.is_free or not tokens:
            return tokens * (self.source.reading or 0.0)
        return UNMEASURED * self.costs.seconds(tokens)

    def _best(self, trees: Trees, room: int) -> tuple[list[Shape], float]:
        count = len(self.sequences)
        least = self.costs.doubt(count) + self.source.keeping + LEAST_GAIN * self.costs.seconds(count)
        settings: Any = {"other_rows": self.rows - count, "least": least, "room": room}
        return allocate_trees(trees, self.costs.seconds, self._draft, **settings)

    def _draft(self, levels: int, tokens: int) -> float:
        if self.source.cost.count:
            return self.source.cost.seconds(levels, tokens)
        return 0.0 if self.source.is_free else UNMEASURED * self.costs.seconds(len(self.sequences))
