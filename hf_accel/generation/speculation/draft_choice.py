"""The choice of what a source drafts in a pass, which is what pays, a trial, or nothing."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from ..sequence import NO_SHAPE, Sequence, Shape
from .costs import CostTable, allocate_trees
from .draft_sources import DraftPlan, DraftSource, Trees, expected_trees, hoped_trees

SHARE = 0.02  # of all time, what trials may lose
REPLAN = 4  # the passes for which a plan holds that drafts
REFRESH = 128  # the passes after which one without drafts shows again what such a pass costs
APART = 3  # the passes from one trial that did not pay to the next, where there is hope
LEAST_GAIN = 0.01  # what drafts must be expected to gain, in passes: less would not pay for mistaking it
UNMEASURED_DRAFT = 0.3  # the assumed time of a model's draft of one token before any was measured, in passes


@dataclass
class DraftChoice:
    """bounds: the most tokens of each sequence that follow each other. rows: of the pass, besides drafted tokens. now:
    the number of the pass. most_nodes: the most tokens of a tree; 0 for chains.
    """

    source: DraftSource
    sequences: abc.Sequence[Sequence]
    bounds: list[int]
    rows: int
    costs: CostTable
    now: int
    most_nodes: int

    def __post_init__(self) -> None:
        self.records = [self.source.at(sequence, self.now) for sequence in self.sequences]

    def plan(self, horizon: int, budget: float) -> DraftPlan:
        """Return the plan with the most new tokens a second, or a trial if it drafts nothing and the budget, in
        seconds, pays for one. horizon: the passes in which drafts must pay for reading sequences.
        """
        source = self.source
        shapes = self._paying(horizon) if any(source.tally.accepted) else []
        if not any(shape.nodes for shape in shapes):
            return self._trial(horizon, budget)
        source.last_paid = self.now
        if self.now < source.last_bare + REFRESH:
            wide = self.rows + sum(shape.nodes for shape in shapes)
            return self._plan(shapes, REPLAN if self.costs.is_known(wide) else 1)
        source.last_bare = self.now
        return self._plan([NO_SHAPE] * len(shapes), 1)

    def _paying(self, horizon: int) -> list[Shape]:
        trees = expected_trees(self.source, self.records, self.bounds, self.most_nodes)
        shapes, gained = self._best(trees)
        if gained * horizon < self._unread(shapes) * (self.source.reading or 0.0):
            read = [tree if record.is_read else [] for tree, record in zip(trees, self.records, strict=True)]
            shapes, _ = self._best(read)
        return shapes

    def _has_hope(self, horizon: int) -> bool:
        """Return whether drafts would pay, reading included, if as many were accepted as the counts leave possible."""
        shapes, gained = self._best(hoped_trees(self.source, self.bounds))
        return gained * horizon > self._unread(shapes) * (self.source.reading or 0.0)

    def _trial(self, horizon: int, budget: float) -> DraftPlan:
        """Return a plan for one token of as many sequences as the budget pays for, those that were read first; or
        for nothing, until there can be a trial.
        """
        prices, shapes = [], [NO_SHAPE] * len(self.records)
        tried = sorted((not record.is_read, record.last_pass, i) for i, record in enumerate(self.records))
        unread, reading = 0, self.source.reading
        for count, (is_new, _, i) in enumerate((each for each in tried if self.bounds[each[2]]), 1):
            unread += is_new
            prices.append(self._price(count) + unread * (reading or 0.0))
            if prices[-1] > budget or (unread > 1 and reading is None):
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
        return sum(bool(shape.nodes) and not one.is_read for shape, one in zip(shapes, self.records, strict=True))

    def _price(self, count: int) -> float:
        """Return the seconds that `count` drafts of one token cost."""
        return self._draft(1, count) + self.costs.extra(self.rows, count)

    def _best(self, trees: Trees) -> tuple[list[Shape], float]:
        count = len(self.sequences)
        least = self.costs.doubt(count) + self.source.keeping + LEAST_GAIN * self.costs.seconds(count)
        return allocate_trees(trees, self.costs.seconds, self._draft, other_rows=self.rows - count, least=least)

    def _draft(self, levels: int, tokens: int) -> float:
        if self.source.cost.count:
            return self.source.cost.seconds(levels, tokens)
        return 0.0 if self.source.is_free else UNMEASURED_DRAFT * self.costs.seconds(len(self.sequences))
