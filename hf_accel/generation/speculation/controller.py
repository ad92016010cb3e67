"""Chooses how many tokens to draft for each sequence, from measured acceptance and measured time.

This is the goodput controller of SmartSpec (arXiv 2406.14066) with three changes. Each sequence has its own
acceptance. Draft lengths are chosen for the whole batch together. A budget limits the loss when drafts are rejected.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any, Literal
from weakref import WeakKeyDictionary

from ...keywords import positive_int
from ..sequence import NO_SHAPE, Draft, Sequence, Shape
from .acceptance import Tally, gains, likeliest_tree
from .costs import CostTable, DraftCost, DraftSeconds, allocate_trees

# Times are in decoding passes of the model.
FIRST_BALANCE, MAX_BALANCE = 0.25, 16.0  # the time that drafts may lose at first, and the most that is kept of gains
EARNED = 0.01  # the share of all time that drafts may lose later
CREDIT = 1.0  # the time that drafts may owe which are expected to pay
HORIZON, INVESTED = 64, 1.5  # in at most so many passes drafts must pay for reading sequences, of so much time
MAX_NODES = 16  # the most tokens of a tree, if nothing else is said
UNMEASURED_DRAFT = 0.3  # the assumed time of a draft of one token before any was measured
FIRST_WAIT, LAST_WAIT = 1, 512  # the passes from one trial to the next where no hope is left, which double
WAIT = 8  # those of a drafter with a model where there is hope, and of another one where a draft was right
HOPE = 1.5  # the standard errors by which the acceptance may be better than it looks
AHEAD = 32  # the passes before the next possible draft from which on hidden states are kept
MANY = 64  # the passes after which it is known whether drafts pay
REFRESH = 64  # the number of passes after which draft lengths other than the best are tried
# The acceptance that is expected before any draft was verified, and its weight in verified tokens. The acceptance
# over all sequences, of about the last 96 drafts, is what is expected of each, of which the last 16 count.
PRIOR, WEIGHT, SOURCE_MEMORY, SEQUENCE_MEMORY = 0.5, 2.5, 96.0, 16.0
# The siblings of a tree that count, and the part of what is left by those before it that one is expected to have.
MOST_SIBLINGS, SIBLING = 6, 0.3


@dataclass
class Drafted:
    """The latest drafts for one sequence. is_read: whether the source has read it, which costs time once."""

    tally: Tally = field(default_factory=partial(Tally, SEQUENCE_MEMORY))
    last_pass: int = -1
    is_read: bool = False
    is_trial: bool = False  # whether the draft of this pass only tests whether drafts pay now


@dataclass
class DraftSource:
    """The acceptance and the costs of a drafter over all sequences, as far as they were observed.

    tally: of chains, and of the likeliest of siblings in trees. ranks: of the second sibling, the third, and so on.
    """

    tally: Tally = field(default_factory=partial(Tally, SOURCE_MEMORY))
    ranks: list[Tally] = field(default_factory=lambda: [Tally(SOURCE_MEMORY) for _ in range(1, MOST_SIBLINGS)])
    sequences: WeakKeyDictionary[Sequence, Drafted] = field(default_factory=WeakKeyDictionary)
    deepest: int = 0  # the most accepted tokens of one draft
    cost: DraftCost = field(default_factory=DraftCost)
    reading: float = 0.0  # seconds to read a sequence for the first time
    is_free: bool = True
    has_hope: bool = False  # whether drafts would pay if they were as often accepted as may still be
    is_tried: bool = False  # whether this pass has a trial
    wait: int = FIRST_WAIT
    next_trial: int = 0  # the pass from which on there may be trials
    idle: tuple[int, int] = (0, 0)  # for so many sequences nothing can be drafted before this pass
    has_paid: bool = False  # whether drafts were ever chosen because they pay

    def of(self, sequence: Sequence) -> Drafted:
        return self.sequences.setdefault(sequence, Drafted())


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
    `observe_asking` for all other time that the drafts took, `observe_drafts` for each sequence that had a draft, and
    `observe_pass` last.

    num_draft: a fixed draft length, which only the limits reduce; or "auto", which chooses the lengths from 0 to
    max_draft with the most new tokens per second, and at most twice the longest accepted draft.

    The loss against decoding without drafts is small, whatever the acceptance is. All time that drafts take is paid
    from `balance`, which starts with FIRST_BALANCE and grows by gains and by EARNED of all time; when it is used up,
    there are no drafts. Where none was ever right, or none pays, there are only trials of one token, and the waits
    between them double until drafts pay; those without a model cost so little that they are tried as often as the
    balance pays for. A drafter reads a sequence when it is first asked for a draft of it (a
    draft model computes the prompt), and it is asked for no sequence that the balance cannot pay to read.
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
            if any(shape.nodes for shape in shapes):
                known.has_paid, known.wait = True, FIRST_WAIT
            if self.num_passes % REFRESH == 0:  # so that times without drafts, or with longer ones, stay new
                shapes = [_larger(*pair, most_nodes) for pair in zip(shapes, bounds, strict=True)]
                shapes = shapes if self.num_passes // REFRESH % 2 else [NO_SHAPE] * len(bounds)
        self._leave_unread(known, records, bounds)
        lacking = known.reading - self.balance
        if self.num_passes >= known.next_trial:
            several = zip(records, bounds, shapes, strict=True)
            known.has_hope = self._has_hope(known, count, rows, draft)
            open_to = [record if bound and not shape.nodes else None for record, bound, shape in several]
            lacking = self._add_trials(open_to, shapes, rows, draft)
        affordable = self.num_passes + int(lacking / (EARNED * one))
        drafts = any(shape.nodes for shape in shapes)
        known.idle = (0, 0) if drafts or is_refreshed else (count, max(known.next_trial, affordable))
        return shapes

    def _leave_unread(self, known: DraftSource, records: list[Drafted], bounds: list[int]) -> None:
        left = self.balance or 0.0  # what it cannot pay to read gets no draft
        for i, record in enumerate(records):
            left -= known.reading if bounds[i] and not record.is_read else 0.0
            bounds[i] = bounds[i] if record.is_read or left >= 0 else 0

    def _has_hope(self, known: DraftSource, count: int, rows: int, draft: DraftSeconds | None) -> bool:
        """Return whether drafts would pay if they were accepted as often as what was seen leaves possible."""
        rate = known.tally.acceptances([PRIOR], WEIGHT)[0]
        seen = WEIGHT + (known.tally.verified[0] if known.tally.verified else 0.0)
        chain = gains([min(1.0, rate + HOPE * sqrt(rate * (1 - rate) / seen))] * self.max_draft)
        every = [[(gain, depth) for depth, gain in enumerate(chain)]] * count
        shapes, _ = allocate_trees(every, self.verify_costs.seconds, draft, other_rows=rows - count)
        return any(shape.nodes for shape in shapes)

    def rests(self, source: str) -> bool:
        """Return whether it is known that nothing will be drafted soon, so that no hidden states are needed for it."""
        known = self.sources.get(source)
        return self.num_draft == "auto" and known is not None and self.num_passes + AHEAD < known.idle[1]

    def verdict(self, source: str) -> str | None:
        """Return why a drafter has drafted nothing but trials, as a clause; None if its drafts have paid, or if that
        is not known after so few passes.
        """
        known = self.sources.get(source)
        if self.num_draft != "auto" or known is None or known.has_paid or self.num_passes < MANY:
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
        self._pass.seconds += cost.seconds(levels, tokens)

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
            self._pass.seconds += seconds

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
        self._pass.drafted += drafted
        self._pass.accepted += accepted

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Learn that a pass of the model over `rows` rows, drafted tokens included, took `seconds`."""
        costs, record, self._pass = self.verify_costs, self._pass, PassRecord()
        costs.observe(rows, seconds)
        for source in self.sources.values():
            if source.is_tried:
                often = source.deepest > 0 if source.is_free else source.has_hope
                source.next_trial = self.num_passes + (WAIT if often else source.wait)
                source.is_tried, source.wait = False, min(2 * source.wait, LAST_WAIT)
        self.num_passes += 1
        if not record.sequences or self.balance is None:
            return
        balance = max(self.balance - record.reading, min(self.balance, 0.0)) - record.seconds  # once
        bare, one = max(1, rows - record.drafted), costs.seconds(record.sequences)
        balance += EARNED * costs.seconds(bare) + record.accepted * one / record.sequences
        balance -= costs.extra(bare, record.drafted) if record.drafted else 0.0
        self.balance = min(balance, max([MAX_BALANCE * one, *(source.reading for source in self.sources.values())]))

    def _source(self, source: str) -> DraftSource:
        return self.sources.setdefault(source, DraftSource())


def expected_gains(
    source: DraftSource, drafted: abc.Sequence[Drafted], bounds: abc.Sequence[int]
) -> list[list[float]]:
    """Return the gains of the next draft of each sequence, of at most bounds[i] tokens."""
    first: list[float | None] = [PRIOR]
    expected: list[float | None] = list(source.tally.acceptances(first + [None] * (max(bounds) - 1), WEIGHT))
    # A position that the source has rarely drafted is expected to be like the sequence's own position before it.
    seen = sum(verified >= SEQUENCE_MEMORY for verified in source.tally.verified)
    expected = [rate if position < max(1, seen) else None for position, rate in enumerate(expected)]
    pairs = zip(drafted, bounds, strict=True)
    return [gains(one.tally.acceptances(expected[:bound], WEIGHT)) for one, bound in pairs]


def expected_trees(
    source: DraftSource, drafted: abc.Sequence[Drafted], bounds: abc.Sequence[int], most_nodes: int
) -> list[list[tuple[float, int]]]:
    """Return the tokens of the next draft of each sequence, as allocate_trees takes them. most_nodes: 0 for chains."""
    chains = expected_gains(source, drafted, bounds)
    if not most_nodes:
        return [[(gain, depth) for depth, gain in enumerate(chain)] for chain in chains]
    trees = []
    for chain in chains:
        rates = [[gain / before if before else 0.0 for gain, before in zip(chain, [1.0, *chain], strict=False)]]
        left = [1 - rate for rate in rates[0]]
        for tally in source.ranks:
            if chain:
                # What a sibling has of what those before it have left is the same at all depths.
                seen = tally.acceptances([SIBLING * left[0], *[None] * (len(chain) - 1)], WEIGHT)
                rates.append([min(pair) for pair in zip(seen, left, strict=True)])
                left = [max(0.0, all - rate) for all, rate in zip(left, rates[-1], strict=True)]
        trees.append(likeliest_tree(rates, most_nodes))
    return trees


def _larger(shape: Shape, bound: int, most_nodes: int) -> Shape:
    """Return about twice as large a draft. bound: its most depth."""
    depth = min(2 * shape.depth + 1, bound)
    return Shape(depth, max(depth, min(2 * shape.nodes + 1, most_nodes)) if depth else 0)
