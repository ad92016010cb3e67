"""Chooses how many tokens to draft for each sequence, from measured acceptance and measured time.

One rule: of all choices for the whole batch, take the one with the most new tokens per second that is expected (the
goodput of SmartSpec, arXiv 2406.14066). Where that is to draft nothing, there are trials, which a budget pays for.
"""

from __future__ import annotations

from collections import abc
from typing import Any, Literal

from ...keywords import positive_int
from ..sequence import NO_SHAPE, Draft, Sequence, Shape
from .costs import SLOW, CostTable
from .draft_choice import LEAST_GAIN, SHARE, UNMEASURED, DraftChoice
from .draft_sources import FIRST_WAIT, MOST_SIBLINGS, SIBLINGS, DraftSource, hoped_rate

MAX_NODES = 16  # the most tokens of a tree, if nothing else is said
# The budget of trials, in passes: what it holds at first and at most.
FIRST_BUDGET, MOST_BUDGET = 0.4, 4.0
LAST_WAIT = 256  # the most passes from one trial to the next
HORIZON = 64  # in at most so many passes drafts must pay for reading sequences
AHEAD = 32  # the passes before the next possible draft from which on hidden states are kept
MANY = 64  # the passes after which it is known whether drafts pay


class Controller:
    """Chooses draft lengths.

    For each pass, call `lengths` or `shapes` (once for each source of drafts), what is observed of that source's
    drafts, and `observe_pass` last.

    num_draft: a fixed draft length, which only the limits reduce; or "auto", which chooses the lengths from 0 to
    max_draft with the most new tokens per second.

    What drafts bring and cost is known from counts of accepted tokens and from clocks, and a plan that drafts is made
    again every few passes. Where none is expected to pay, there are trials of one token for each sequence, as soon as
    the budget pays for one: it is given SHARE of all time, and a trial takes from it what it costs beyond what it
    brings. If even an acceptance at the end of what the counts leave possible would not pay, the distance between
    trials doubles each time. A drafter reads a sequence when it is first asked for a draft of it (a draft model
    computes the prompt); drafts must pay for that within HORIZON passes.
    """

    def __init__(
        self, num_draft: int | Literal["auto"] = "auto", max_draft: int = 8, max_nodes: int = MAX_NODES
    ) -> None:
        if num_draft not in ("auto", 0):
            positive_int("num_draft", num_draft)
        positive_int("max_draft", max_draft)
        positive_int("max_nodes", max_nodes)
        self.num_draft, self.max_draft, self.max_nodes, self.num_passes = num_draft, max_draft, max_nodes, 0
        self.verify_costs = CostTable()
        self.sources: dict[str, DraftSource] = {}
        self.budget: float | None = None  # seconds
        self._kept = 0.0  # the seconds in which this pass has kept states
        self._sequences = 0  # that decode in this pass

    # -- before a pass ---------------------------------------------------------------------------------

    def lengths(
        self, sequences: abc.Sequence[Sequence], limits: abc.Sequence[int], *,
        other_rows: int = 0, is_free: bool = True, source: str = "", room: int | None = None,
    ) -> list[int]:  # fmt: skip
        """Return the number of tokens to draft for each of `sequences`, which all decode in the next pass.

        limits: the largest number for each sequence. other_rows: the rows of the pass that do not depend on this
        choice, such as prefill, and sequences with a draft of another source. is_free: whether drafting needs no pass
        of a model. source: the name of the drafter; acceptance and cost are learnt for each source. room: the most
        drafted tokens of the pass, beyond which a caller drops them; None for any number.
        """
        settings: Any = {"other_rows": other_rows, "is_free": is_free, "source": source, "room": room}
        return [shape.nodes for shape in self._shapes(sequences, limits, 0, **settings)]

    def expect(self, acceptance: float, source: str = "") -> None:
        """Expect that so many of the first tokens of a drafter are accepted, as long as none was verified."""
        self._source(source).expected = acceptance

    def shapes(
        self, sequences: abc.Sequence[Sequence], limits: abc.Sequence[int], *, trees: bool = False, **settings: Any
    ) -> list[Shape]:
        """Return what to draft for each of `sequences`; see `lengths`. trees: whether the drafter proposes trees."""
        if trees:
            return self._shapes(sequences, limits, self.max_nodes, **settings)
        return [Shape(length, length) for length in self.lengths(sequences, limits, **settings)]

    def rests(self, source: str, passes: int = AHEAD, *, count: int | None = None) -> bool:
        """Return whether it is known that nothing will be drafted in this pass and so many after it; for `count`
        sequences, or for as many as there were.
        """
        known = self.sources.get(source)
        if known is None or known.plan.drafts or self.num_passes + passes >= known.plan.until:
            return False
        return count is None or count == len(known.plan.sequences)

    def verdict(self, source: str) -> str | None:
        """Return why the drafts of a drafter do not pay, as a clause; None if they were expected to lately, or if that
        is not known after so few passes.
        """
        known = self.sources.get(source)
        if self.num_draft != "auto" or known is None or self.num_passes < known.last_paid + MANY:
            return None
        if not sum(known.tally.verified) or not known.cost.count or not self.verify_costs.is_measured(1):
            return None
        one = self.verify_costs.seconds(1)
        cost = known.cost.seconds(1, 1) / one
        if hoped_rate(known) > cost + self.verify_costs.seconds(2) / one - 1:
            return None  # the few trials leave it possible that they would
        rate = known.tally.acceptances([None], 0)[0]
        return f"drafts of {source!r} do not pay: a token costs {cost:.2f} of a pass, and {rate:.0%} are accepted"

    def _shapes(
        self, sequences: abc.Sequence[Sequence], limits: abc.Sequence[int], most_nodes: int, **settings: Any
    ) -> list[Shape]:
        """Return what to draft. most_nodes: the most tokens of a tree; 0 for chains."""
        self._sequences = max(self._sequences, len(sequences))
        if self.num_draft != "auto":
            depths = (max(0, min(self.num_draft, limit)) for limit in limits)
            return [Shape(depth, max(depth, most_nodes) if depth else 0) for depth in depths]
        known, rows = self._source(settings.get("source", "")), len(sequences) + settings.get("other_rows", 0)
        # Longer drafts than any that was accepted are tried step by step, because nobody knows yet what they cost.
        deepest = min(self.max_draft, max(1, 2 * sum(count > 0 for count in known.tally.accepted)))
        bounds = [max(0, min(limit, deepest)) for limit in limits]
        if self.num_passes < known.plan.until and known.plan.holds_for(sequences, rows, trees=most_nodes > 0):
            return known.plan.within(bounds)
        room = sum(bounds) * max(1, most_nodes) if settings.get("room") is None else settings["room"]
        if not any(bounds) or room < 1 or not self.verify_costs.is_measured(rows):
            return [NO_SHAPE] * len(bounds)
        if self.budget is None:
            self.budget = FIRST_BUDGET * self.verify_costs.seconds(len(sequences))
        known.is_free = settings.get("is_free", True)
        nodes = min(most_nodes, SIBLINGS * deepest)
        choice = DraftChoice(known, sequences, bounds, rows, self.verify_costs, self.num_passes, room, nodes)
        known.plan = choice.plan(min(HORIZON, max(limits)), self.budget)
        return known.plan.within(bounds)

    # -- what is observed ------------------------------------------------------------------------------

    def observe_drafting(self, tokens: int, levels: int, seconds: float, source: str = "") -> None:
        """Learn the cost of drafting: `tokens` tokens in all, of which `levels` follow each other, took `seconds`.

        What only computed earlier tokens, such as a prompt, must not be counted.
        """
        known = self._source(source)
        if levels:
            if not known.cost.count and self._sequences and self.verify_costs.widths:
                # The first one may be an outlier, and would be the last if it were believed.
                seconds = min(seconds, levels * self.verify_costs.seconds(self._sequences))
            known.cost.observe(levels, tokens, seconds)
        known.seconds += seconds

    def observe_reading(self, sequences: abc.Sequence[Sequence], seconds: float, source: str = "") -> float:
        """Learn that it took `seconds` until a drafter was ready to draft for these sequences.

        Returns how many of them count as reading: all if it had to read many tokens of any sequence, else none.
        """
        known = self._source(source)
        tokens = sum(known.of(sequence).ahead(sequence) for sequence in sequences)
        for sequence in sequences:
            known.of(sequence).num_read = len(sequence.tokens)
        if not tokens:
            return 0.0
        # A first reading may take much longer than those that follow.
        before = known.reading
        if before is None:
            before = UNMEASURED * self.verify_costs.seconds(tokens) / tokens if self.verify_costs.widths else 0.0
        known.reading = min(seconds / tokens, (before + seconds / tokens) / 2)
        known.seconds += seconds
        return seconds

    def observe_keeping(self, seconds: float, source: str = "") -> None:
        """Learn that a pass has taken `seconds` longer because it has kept what a drafter reads, or chosen lengths."""
        self._source(source).kept += seconds
        self._kept += seconds

    def observe_drafts(self, sequence: Sequence, drafted: int, accepted: int, source: str = "") -> None:
        """Learn the acceptance of a draft. Without a draft, there is nothing to learn."""
        if drafted:
            known = self._source(source)
            record = known.of(sequence)
            known.tally.add(drafted, accepted)
            record.tally.add(drafted, accepted)
            self._observe(known, sequence, drafted, accepted)

    def observe_tree(self, sequence: Sequence, draft: Draft, rows: list[int], source: str = "") -> None:
        """Learn the acceptance of a tree. rows: row 0 of the draft, and those of the accepted tokens."""
        known = self._source(source)
        record = known.of(sequence)
        for tally in (known.tally, record.tally, *known.ranks):
            tally.fade()
        ranks = draft.ranks
        for depth, (row, taken) in enumerate(zip(rows, [*rows[1:], -1], strict=True)):
            for child, rank in ranks.get(row, {}).items():
                own = [known.ranks[rank - 1]] if 0 < rank < MOST_SIBLINGS else [known.tally, record.tally]
                for tally in own if rank < MOST_SIBLINGS else ():
                    tally.count(depth, accepted=child == taken)
        self._observe(known, sequence, len(draft), len(rows) - 1)

    def _observe(self, known: DraftSource, sequence: Sequence, drafted: int, accepted: int) -> None:
        record = known.of(sequence)
        record.last_pass, record.num_read = self.num_passes, len(sequence.tokens)
        known.drafted, known.accepted = known.drafted + drafted, known.accepted + accepted

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Learn that a pass of the model over `rows` rows, drafted tokens included, took `seconds`."""
        self.verify_costs.observe(rows, seconds - self._kept)
        self.num_passes += 1
        for known in self.sources.values():
            if known.kept:
                known.keeping += (known.kept - known.keeping) / (8 if known.keeping else 1)
                known.kept = 0.0
        if self.num_draft == "auto" and self.budget is not None:
            self.budget = min(self.budget + SHARE * seconds, max(self.budget, MOST_BUDGET * seconds))
            if not any(known.plan.pays for known in self.sources.values()):
                self.budget -= min(self._kept, SHARE / 2 * seconds)  # which is for the next trial
            for known in self.sources.values():
                if known.drafted or known.seconds:
                    self._settle(known, rows, seconds - self._kept)
        self._kept, self._sequences = 0.0, 0

    def _settle(self, known: DraftSource, rows: int, seconds: float) -> None:
        """Charge what the drafts of this pass have cost, if they were a trial. seconds: of the pass.

        A pass may have taken longer than is expected of it. And one that seems to have gained as little as a wrong
        clock lets it says nothing about the next.
        """
        if known.plan.is_trial:
            assert self.budget is not None
            costs, bare = self.verify_costs, max(1, rows - known.drafted)
            each = costs.seconds(self._sequences)
            gain = known.accepted * each / self._sequences - known.seconds
            if known.drafted:
                taken = min(seconds, SLOW * costs.seconds(rows)) - costs.seconds(bare)
                gain -= max(costs.extra(bare, known.drafted), taken)
            self.budget += gain
            pays = gain > LEAST_GAIN * each
            if not pays:
                known.last_trial = self.num_passes
            known.wait = FIRST_WAIT if pays else min(2 * known.wait, LAST_WAIT)
            known.next_trial = self.num_passes + known.wait
        known.drafted, known.accepted, known.seconds = 0, 0, 0.0

    def _source(self, source: str) -> DraftSource:
        known = self.sources.get(source)
        if known is None:
            known = self.sources[source] = DraftSource()
        return known
