"""Chooses how many tokens to draft for each sequence, from measured acceptance and measured time.

This is the goodput controller of SmartSpec (arXiv 2406.14066) with three changes. Each sequence has its own
acceptance. Draft lengths are chosen for the whole batch together. A budget limits the loss when drafts are rejected.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

from ...keywords import positive_int
from ..sequence import NO_SHAPE, Draft, Sequence, Shape
from .acceptance import gains
from .costs import CostTable, DraftSeconds, allocate_trees
from .draft_sources import FIRST_WAIT, MOST_SIBLINGS, PRIOR, WEIGHT, Drafted, DraftSource, expected_trees

# Times are in decoding passes of the model.
FIRST_BALANCE, MAX_BALANCE = 0.25, 16.0  # the time that drafts may lose at first, and the most that is kept of gains
EARNED = 0.01  # the share of all time that drafts may lose later
CREDIT = 1.0  # the time that drafts may owe which are expected to pay
HORIZON, INVESTED = 64, 1.5  # in at most so many passes drafts must pay for reading sequences, of so much time
MAX_NODES = 16  # the most tokens of a tree, if nothing else is said
UNMEASURED_DRAFT = 0.3  # the assumed time of a draft of one token before any was measured
# The passes from one trial to the next, which double from FIRST_WAIT on where no hope is left. WAIT: those of a
# drafter with a model where there is hope, and of another one where a draft was right.
LAST_WAIT, WAIT = 512, 8
HOPE = 1.5  # the standard errors by which the acceptance may be better than it looks
AHEAD = 32  # the passes before the next possible draft from which on hidden states are kept
MANY = 64  # the passes after which it is known whether drafts pay
REFRESH = 64  # the number of passes after which draft lengths other than the best are tried


@dataclass
class PassRecord:
    """The drafts of a pass. seconds: of all that was done for them before it, except for reading sequences."""

    sequences: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    reading: float = 0.0


class Controller:
    """Chooses draft lengths.

    For each pass, call `lengths` (once for each source of drafts), `observe_drafting` if a model drafted,
    `observe_asking` for all other time that the drafts took, `observe_keeping` if states were kept for a drafter,
    `observe_drafts` for each sequence that had a draft, and `observe_pass` last.

    num_draft: a fixed draft length, which only the limits reduce; or "auto", which chooses the lengths from 0 to
    max_draft with the most new tokens per second, and at most twice the longest accepted draft.

    The loss against decoding without drafts is small, whatever the acceptance is. All time that drafts take is paid
    from `balance`, which starts with FIRST_BALANCE and grows by gains and by EARNED of all time; when it is used up,
    there are no drafts. Where none was ever right, or none pays, there are only trials of one token, and the waits
    between them double until drafts pay; those without a model cost so little that they are tried as often as the
    balance pays for. A drafter reads a sequence when it is first asked for a draft of it (a draft model computes the
    prompt), and it is asked for no sequence that the balance cannot pay to read.
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
        self.balance: float | None = None  # seconds
        self._pass = PassRecord()

    def shapes(
        self, sequences: abc.Sequence[Sequence], limits: abc.Sequence[int], *, trees: bool = False, **settings: Any
    ) -> list[Shape]:
        """Return what to draft for each of `sequences`; see `lengths`. trees: whether the drafter proposes trees."""
        if trees:
            return self._shapes(sequences, limits, most_nodes=self.max_nodes, **settings)
        return [Shape(length, length) for length in self.lengths(sequences, limits, **settings)]

    def lengths(
        self, sequences: abc.Sequence[Sequence], limits: abc.Sequence[int], *,
        other_rows: int = 0, is_free: bool = True, source: str = "",
    ) -> list[int]:  # fmt: skip
        """Return the number of tokens to draft for each of `sequences`, which all decode in the next pass.

        limits: the largest number for each sequence. other_rows: the rows of the pass that do not depend on this
        choice, such as prefill, and sequences with a draft of another source. is_free: whether drafting needs no pass
        of a model. source: the name of the drafter; acceptance and cost are learnt for each source.
        """
        settings: Any = {"other_rows": other_rows, "is_free": is_free, "source": source}
        return [shape.nodes for shape in self._shapes(sequences, limits, **settings)]

    def _shapes(
        self, sequences: abc.Sequence[Sequence], limits: abc.Sequence[int], *,
        other_rows: int = 0, is_free: bool = True, source: str = "", most_nodes: int = 0,
    ) -> list[Shape]:  # fmt: skip
        """Return the drafts with the most new tokens a second. most_nodes: the most tokens of a tree; 0 for chains."""
        count = self._pass.sequences = max(self._pass.sequences, len(sequences))
        if self.num_draft != "auto":
            depths = (max(0, min(self.num_draft, limit)) for limit in limits)
            return [Shape(depth, max(depth, most_nodes) if depth else 0) for depth in depths]
        known, costs, rows = self._source(source), self.verify_costs, len(sequences) + other_rows
        known.is_free = is_free
        bounds = [max(0, min(limit, self.max_draft, max(1, 2 * known.deepest))) for limit in limits]
        shapes = [NO_SHAPE] * len(bounds)
        # To find that nothing can be drafted takes as long as a draft does in a small model. So it is remembered.
        idle = known.idle[0] == count and self.num_passes < known.idle[1]
        if idle or not any(bounds) or not costs.is_measured(rows):
            return shapes
        one = costs.seconds(count)
        self.balance = FIRST_BALANCE * one if self.balance is None else self.balance
        if self.balance <= (-CREDIT * one if known.deepest else 0.0):
            return shapes
        records = [known.of(sequence) for sequence in sequences]
        draft = None if is_free else known.cost.seconds if known.cost.count else lambda *shape: UNMEASURED_DRAFT * one
        is_refreshed = known.deepest > 0 and self.num_passes % REFRESH == 0
        if known.deepest:
            settings: Any = {"other_rows": rows - count, "least": costs.doubt(rows)}
            trees = expected_trees(known, records, bounds, most_nodes)
            shapes, gained = allocate_trees(trees, costs.seconds, draft, **settings)
            missing = sum(
                bool(shape.nodes) and not record.is_read for shape, record in zip(shapes, records, strict=True)
            )
            earned = min(gained * min(HORIZON, max(limits)), INVESTED * one)
            if missing * known.reading > max(self.balance, earned):
                self._leave_unread(known, records, bounds)
                trees = expected_trees(known, records, bounds, most_nodes)
                shapes, _ = allocate_trees(trees, costs.seconds, draft, **settings)
            if known.gained > 0:
                known.wait = FIRST_WAIT
            if self.num_passes % REFRESH == 0:  # so that times without drafts, or with longer ones, stay new
                shapes = [_larger(*pair, most_nodes) for pair in zip(shapes, bounds, strict=True)]
                shapes = shapes if self.num_passes // REFRESH % 2 else [NO_SHAPE] * len(bounds)
        self._leave_unread(known, records, bounds)
        lacking = known.reading - self.balance
        if self.num_passes >= known.next_trial:
            several = zip(records, bounds, shapes, strict=True)
            known.has_hope = self._has_hope(known, records, rows, draft)
            open_to = [record if bound and not shape.nodes else None for record, bound, shape in several]
            lacking = self._add_trials(open_to, shapes, rows, draft)
        affordable = self.num_passes + int(lacking / (EARNED * one))
        drafts = any(shape.nodes for shape in shapes)
        known.idle = (0, 0) if drafts or is_refreshed else (count, max(known.next_trial, affordable))
        return shapes

    def _leave_unread(self, known: DraftSource, records: list[Drafted], bounds: list[int]) -> None:
        """Set the bounds of sequences to 0 that the balance cannot pay to read."""
        left = self.balance or 0.0
        for i, record in enumerate(records):
            left -= known.reading if bounds[i] and not record.is_read else 0.0
            bounds[i] = bounds[i] if record.is_read or left >= 0 else 0

    def _has_hope(self, known: DraftSource, records: list[Drafted], rows: int, draft: DraftSeconds | None) -> bool:
        """Return whether drafts of the whole batch would pay, and so would what is read and kept for them, if they
        were accepted as often as what was seen leaves possible.
        """
        rate = known.tally.acceptances([PRIOR], WEIGHT)[0]
        seen = WEIGHT + (known.tally.verified[0] if known.tally.verified else 0.0)
        chain = gains([min(1.0, rate + HOPE * sqrt(rate * (1 - rate) / seen))] * self.max_draft)
        every = [[(gain, depth) for depth, gain in enumerate(chain)]] * len(records)
        settings: Any = {"other_rows": rows - len(records), "least": self.verify_costs.doubt(rows)}
        shapes, gained = allocate_trees(every, self.verify_costs.seconds, draft, **settings)
        unread = sum(bool(shape.nodes) and not record.is_read for shape, record in zip(shapes, records, strict=True))
        return gained > known.keeping + unread * known.reading / HORIZON

    def rests(self, source: str) -> bool:
        """Return whether it is known that nothing will be drafted soon, so that no hidden states are needed for it."""
        known = self.sources.get(source)
        return self.num_draft == "auto" and known is not None and self.num_passes + AHEAD < known.idle[1]

    def verdict(self, source: str) -> str | None:
        """Return why the drafts of a drafter do not pay, as a clause; None if they have gained time lately, or if
        that is not known after so few passes.
        """
        known = self.sources.get(source)
        if self.num_draft != "auto" or known is None or known.gained > 0 or self.num_passes < MANY:
            return None
        if not known.tally.verified or not known.cost.count or not self.verify_costs.is_measured(1):
            return None
        cost, rate = known.cost.seconds(1, 1) / self.verify_costs.seconds(1), known.tally.acceptances([None], 0)[0]
        if rate > cost + self.verify_costs.seconds(2) / self.verify_costs.seconds(1) - 1:
            return None  # the few trials say that they would
        return f"drafts of {source!r} do not pay: a token costs {cost:.2f} of a pass, and {rate:.0%} are accepted"

    def _add_trials(
        self, records: list[Drafted | None], shapes: list[Shape], rows: int, draft: DraftSeconds | None
    ) -> float:
        """Add a token for sequences without a draft, those without one for longest first, as the balance pays for.

        records: None where there is no trial. Returns the seconds that the balance lacks for one more.
        """
        assert self.balance is not None
        rows += sum(shape.nodes for shape in shapes)
        width, price = sum(shape.nodes > 0 for shape in shapes), 0.0
        costs, seconds = self.verify_costs, draft or (lambda levels, tokens: 0.0)
        tried = sorted((record.last_pass, i, record) for i, record in enumerate(records) if record)
        for count, (_, i, record) in enumerate(tried, 1):
            price = costs.seconds(rows + count) - costs.seconds(rows)
            price += seconds(1, width + count) - (seconds(1, width) if width else 0.0)
            if price > self.balance:
                break
            shapes[i], record.is_trial = Shape(1, 1), True
        return price - self.balance

    def observe_drafting(self, tokens: int, levels: int, seconds: float, source: str = "") -> None:
        """Learn the cost of drafting: `tokens` tokens in all, of which `levels` follow each other, took `seconds`.

        What only computed earlier tokens, such as a prompt, must not be counted.
        """
        if levels < 1:
            return
        cost = self._source(source).cost
        cost.observe(levels, tokens, seconds)
        self._spend(cost.seconds(levels, tokens), source)

    def observe_asking(self, sequences: abc.Sequence[Sequence], seconds: float, source: str = "") -> None:
        """Learn that it took `seconds` to get drafts of these sequences, besides what `observe_drafting` gets.

        Without sequences, it is the time of something else that would not be done without drafts.
        """
        new = [r for r in (self._source(source).of(sequence) for sequence in sequences) if not r.is_read]
        for record in new:
            record.is_read = True
        if new:
            known, each = self._source(source), seconds / len(new)
            # A first reading may take much longer than those that follow.
            known.reading = min(each, (known.reading + each) / 2) if known.reading else each
            self._pass.reading += seconds
        else:
            self._spend(seconds, source if sequences else None)

    def observe_keeping(self, seconds: float, source: str = "") -> None:
        """Learn that it took `seconds` of a pass to keep what a drafter reads. They count as time of the pass."""
        known = self._source(source)
        # A pass over a prompt keeps more than those that follow.
        known.keeping = min(seconds, (known.keeping + seconds) / 2) if known.keeping else seconds

    def observe_drafts(self, sequence: Sequence, drafted: int, accepted: int, source: str = "") -> None:
        """Learn the acceptance: of `drafted` tokens the first `accepted` were accepted. No draft changes nothing."""
        if drafted < 1:
            return
        known = self._source(source)
        record = known.of(sequence)
        for tally in (known.tally, record.tally):
            tally.add(drafted, accepted)
        self._observe(known, record, drafted, accepted)

    def observe_tree(self, sequence: Sequence, draft: Draft, rows: abc.Sequence[int], source: str = "") -> None:
        """Learn the acceptance of a tree. rows: row 0 of the draft, and those of the accepted tokens."""
        known = self._source(source)
        record = known.of(sequence)
        ranks = draft.ranks
        for depth, (row, taken) in enumerate(zip(rows, [*rows[1:], -1], strict=True)):
            for child, rank in ranks.get(row, {}).items():
                own = [known.ranks[rank - 1]] if 0 < rank < MOST_SIBLINGS else [known.tally, record.tally]
                for tally in own if rank < MOST_SIBLINGS else ():
                    tally.count(depth, accepted=child == taken)
        self._observe(known, record, len(draft), len(rows) - 1)

    def _observe(self, known: DraftSource, record: Drafted, drafted: int, accepted: int) -> None:
        known.is_tried, record.is_trial = known.is_tried or record.is_trial, False
        known.deepest, record.last_pass = max(known.deepest, accepted), self.num_passes
        known.drafted, known.accepted = known.drafted + drafted, known.accepted + accepted
        self._pass.drafted += drafted
        self._pass.accepted += accepted

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Learn that a pass of the model over `rows` rows, drafted tokens included, took `seconds`."""
        costs, record, self._pass = self.verify_costs, self._pass, PassRecord()
        costs.observe(rows, seconds)
        self._count_gains(record, rows)
        for source in self.sources.values():
            if source.is_tried:
                often = source.deepest > 0 if source.is_free else source.has_hope
                source.next_trial = self.num_passes + (WAIT if often else source.wait)
                source.is_tried, source.wait = False, min(2 * source.wait, LAST_WAIT)
        self.num_passes += 1
        if not record.sequences or self.balance is None:
            return
        # A reading that takes longer than the balance pays for is not paid later, because it is done only once.
        balance = max(self.balance - record.reading, min(self.balance, 0.0)) - record.seconds
        bare, one = max(1, rows - record.drafted), costs.seconds(record.sequences)
        balance += EARNED * costs.seconds(bare) + record.accepted * one / record.sequences
        balance -= costs.extra(bare, record.drafted) if record.drafted else 0.0
        self.balance = min(balance, max([MAX_BALANCE * one, *(source.reading for source in self.sources.values())]))

    def _count_gains(self, record: PassRecord, rows: int) -> None:
        sources = self.sources.values()
        saved = self.verify_costs.seconds(record.sequences) / record.sequences if record.accepted else 0.0
        added = 0.0
        if record.drafted:  # what no drafter took alone is shared by the drafted tokens
            added = record.seconds - sum(source.seconds for source in sources)
            added += self.verify_costs.seconds(rows) - self.verify_costs.seconds(max(1, rows - record.drafted))
            added /= record.drafted
        for source in sources:
            source.end_pass(saved, added)

    def _spend(self, seconds: float, source: str | None) -> None:
        self._pass.seconds += seconds
        if source is not None:
            self._source(source).seconds += seconds

    def _source(self, source: str) -> DraftSource:
        return self.sources.setdefault(source, DraftSource())


def _larger(shape: Shape, bound: int, most_nodes: int) -> Shape:
    """Return about twice as large a draft. bound: its most depth."""
    depth = min(2 * shape.depth + 1, bound)
    return Shape(depth, max(depth, min(2 * shape.nodes + 1, most_nodes)) if depth else 0)
