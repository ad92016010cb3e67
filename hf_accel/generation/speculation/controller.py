"""Chooses how many tokens to draft for each sequence, from measured acceptance and measured time.

This is the goodput controller of SmartSpec (arXiv 2406.14066) with three changes. Each sequence has its own
acceptance. Draft lengths are chosen for the whole batch together. Two time budgets limit the loss when drafts are
rejected.
"""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

from ...keywords import positive_int
from ..sequence import Sequence
from .acceptance_rates import SequenceRates, SourceRates
from .allocation import Allocation, Prices, allocate, no_time
from .break_even import gains
from .cost_table import CostTable

# Times are in decoding passes of the model.
INITIAL_BALANCE = 0.25  # how much time drafting may lose before it has gained any
MAX_BALANCE = 16.0  # how much gained time is kept at most, to pay for later losses
PROBE_SHARE = 0.01  # the share of the time that is spent on probes, which test whether drafts pay now
MAX_PROBE_BUDGET = 2.0  # how much time is saved for probes at most
UNMEASURED_DRAFT_COST = 0.3  # the assumed time of a drafter's pass before it was measured
REFRESH = 64  # the number of passes after which draft lengths other than the best are tried


@dataclass
class PassRecord:
    """The decisions for a pass, and its results."""

    sequences: int = 0  # the number of decoding sequences
    probes: set[int] = field(default_factory=set)  # id() of the sequences whose drafts are probes
    drafted: int = 0  # tokens
    probed: int = 0  # tokens drafted as probes
    accepted: int = 0  # tokens
    drafting_seconds: float = 0.0  # of passes of a drafter's model
    asking_seconds: float = 0.0  # of choosing lengths, and of drafters without a model
    start_seconds: float = 0.0  # of drafters that read sequences for the first time


class Controller:
    """Chooses draft lengths.

    For each pass, call `lengths` (once for each source of drafts), `observe_drafting` if a model drafted,
    `observe_asking` for all other time that the drafts took, `observe_drafts` for each sequence that had a draft, and
    `observe_pass` last.

    num_draft: a fixed draft length, which only the limits reduce; or "auto", which chooses the lengths from 0 to
    max_draft with the most new tokens per second. The first draft of a source has one token. Later drafts are at most
    twice as long as the longest accepted one. What is learnt of a source is used for all later sequences.

    The loss against decoding without drafts is small, whatever the acceptance is, because all time that drafts take
    is paid. Losses are paid from `balance`, which starts with INITIAL_BALANCE and grows only by gains. When it is used
    up, there are no drafts but probes, which are paid from `probe_budget`, PROBE_SHARE of the time. A drafter reads a
    sequence when it is first asked for a draft of it: a draft model computes the prompt. That is paid from what gains
    have left, or else from the probe budget, which may fall below 0; and until one of the two has as much again, a
    drafter is asked for no sequence that it has not read.
    """

    def __init__(self, num_draft: int | Literal["auto"] = "auto", max_draft: int = 8) -> None:
        if num_draft not in ("auto", 0):
            positive_int("num_draft", num_draft)
        positive_int("max_draft", max_draft)
        self.num_draft = num_draft
        self.max_draft = max_draft
        self.verify_costs = CostTable()
        self.draft_costs: dict[str, CostTable] = {}
        self.sources: dict[str, SourceRates] = {}
        self._rates: WeakKeyDictionary[Sequence, dict[str, SequenceRates]] = WeakKeyDictionary()
        self._pass = PassRecord()
        self._histogram: Counter[int] = Counter()
        self.num_passes = 0
        self.balance: float | None = None  # seconds
        self.probe_budget = 0.0  # seconds
        self._probe_price = 0.0  # the seconds of the last probe that the budget was too small for
        self._starts: dict[str, float] = {}  # seconds that a source took to read a sequence
        self._refreshed = 0  # the pass in which other lengths than the best were tried last
        self._refresh_up = False  # whether longer drafts are tried next, or none

    # -- before a pass ---------------------------------------------------------------------------------

    def lengths(
        self,
        sequences: abc.Sequence[Sequence],
        limits: abc.Sequence[int],
        *,
        other_rows: int = 0,
        is_free: bool = True,
        source: str = "",
    ) -> list[int]:
        """Return the number of tokens to draft for each of `sequences`, which all decode in the next pass.

        limits: the largest number for each sequence. other_rows: the rows of the pass that do not depend on this
        choice, such as prefill, and sequences with a draft of another source. is_free: whether drafting needs no pass
        of a model. source: the name of the drafter; acceptance and cost are learnt for each source.
        """
        self._pass.sequences = max(self._pass.sequences, len(sequences))
        if self.num_draft != "auto":
            lengths = [max(0, min(self.num_draft, limit)) for limit in limits]
        elif self._cannot_pay:
            lengths = [0] * len(limits)
        else:
            longest = min(self.max_draft, self._source(source).longest_draft)
            bounds = [max(0, min(limit, longest)) for limit in limits]
            lengths = self._choose(sequences, bounds, other_rows, is_free=is_free, source=source)
        self._histogram.update(lengths)
        return lengths

    @property
    def _cannot_pay(self) -> bool:
        """True if no draft can be chosen. To choose otherwise takes as long as a draft does in a small model."""
        return self.balance is not None and self.balance <= 0 and self.probe_budget < self._probe_price

    def _choose(
        self, sequences: abc.Sequence[Sequence], bounds: list[int], other_rows: int, *, is_free: bool, source: str
    ) -> list[int]:
        nothing = [0] * len(bounds)
        count = self._pass.sequences
        rows = len(sequences) + other_rows
        costs = self.verify_costs
        if not any(bounds) or not costs.is_measured(rows):
            return nothing  # this pass measures what a pass without drafts costs
        if self.balance is None:
            self.balance = INITIAL_BALANCE * costs.seconds(count)
        start = self._starts.get(source, 0.0)
        self.probe_budget = min(self.probe_budget, max(MAX_PROBE_BUDGET * costs.seconds(count), start))
        rates = [self._rates_of(sequence, source) for sequence in sequences]
        bounds = self._startable(rates, bounds, start)
        if not any(bounds):
            return nothing
        draft = no_time if is_free else self._drafting(source, count)
        prices = Prices(count, rows - count, costs.seconds, draft, alone=costs.is_measured(count))
        source_rates = self._source(source).acceptances(max(bounds))
        chains = [gains(r.acceptances(source_rates[:bound])) for r, bound in zip(rates, bounds, strict=True)]
        best = allocate(chains, prices)
        lengths = self._refresh(best, bounds, chains, prices)
        if self.balance <= 0:
            lengths = nothing
        return self._probe(sequences, lengths, bounds, rates, prices=prices)

    def _startable(self, rates: list[SequenceRates], bounds: list[int], start: float) -> list[int]:
        """Return the bounds, with 0 for sequences whose reading, of `start` seconds each, nothing pays."""
        assert self.balance is not None
        left = max(self.balance, self.probe_budget) / start if start else len(bounds)
        startable = []
        for known, bound in zip((rate.is_known for rate in rates), bounds, strict=True):
            startable.append(bound if known or left >= 1 else 0)
            left -= 0 if known or not bound else 1
        return startable

    def _drafting(self, source: str, sequences: int) -> Callable[[int], float]:
        table = self.draft_costs.get(source)
        if table is not None and table.widths:
            return table.seconds
        unknown = UNMEASURED_DRAFT_COST * self.verify_costs.seconds(sequences)
        return lambda rows: unknown

    def _refresh(self, best: Allocation, bounds: list[int], chains: list[list[float]], prices: Prices) -> list[int]:
        """Return the best lengths, or, every REFRESH passes, none or longer drafts, to measure their cost again.

        Other lengths than the best are returned only if the probe budget pays for the expected loss.
        """
        if self.num_passes - self._refreshed < REFRESH or not any(best.lengths):
            return best.lengths
        more = [min(2 * length + 1, bound) for length, bound in zip(best.lengths, bounds, strict=True)]
        other = more if self._refresh_up else [0] * len(bounds)
        loss = self._loss(best, other, chains, prices)
        self._refreshed = self.num_passes
        self._refresh_up = not self._refresh_up
        if loss > self.probe_budget:
            return best.lengths
        self.probe_budget -= loss
        return other

    def _loss(self, best: Allocation, other: list[int], chains: list[list[float]], prices: Prices) -> float:
        """The seconds that other lengths than the best are expected to lose."""

        def tokens(lengths: list[int]) -> float:
            return sum(sum(chain[:length]) for chain, length in zip(chains, lengths, strict=True))

        lost = (tokens(best.lengths) - tokens(other)) / best.rate
        return max(0.0, lost + prices.extra(other) - prices.extra(best.lengths))

    def _probe(
        self,
        sequences: abc.Sequence[Sequence],
        lengths: list[int],
        bounds: list[int],
        rates: list[SequenceRates],
        *,
        prices: Prices,
    ) -> list[int]:
        """Draft one token for sequences without a draft, as long as the probe budget pays for it.

        Sequences that have had no draft for longest come first.
        """
        idle = [i for i, (length, bound) in enumerate(zip(lengths, bounds, strict=True)) if bound and not length]
        if not idle or self.probe_budget <= 0:
            return lengths
        probed = list(lengths)
        before = prices.extra(lengths) - self._uncertain_seconds(prices.rows + sum(lengths), 1)
        for i in sorted(idle, key=lambda i: rates[i].last_pass):
            probed[i] = 1
            self._probe_price = prices.extra(probed) - before
            if self._probe_price > self.probe_budget:
                probed[i] = 0
                break
            self._pass.probes.add(id(sequences[i]))
        return probed

    # -- after a pass ----------------------------------------------------------------------------------

    def observe_drafting(self, tokens: int, passes: int, seconds: float, source: str = "") -> None:
        """Learn the cost of drafting: `passes` passes of a drafter gave `tokens` tokens in all, in `seconds`.

        Passes that only computed earlier tokens, such as a prompt, must not be counted.
        """
        if passes < 1:
            return
        width = max(1, round(tokens / passes))
        table = self.draft_costs.setdefault(source, CostTable())
        table.observe(width, seconds / passes)
        self._pass.drafting_seconds += passes * table.seconds(width)

    def observe_asking(self, sequences: abc.Sequence[Sequence], seconds: float, source: str = "") -> None:
        """Learn that it took `seconds` to get drafts of these sequences, besides the seconds that `observe_drafting`
        got.

        Without sequences, it is the time of something else that would not be done without drafts.
        """
        new = [rates for rates in (self._rates_of(s, source) for s in sequences) if not rates.is_known]
        if not new:
            self._pass.asking_seconds += seconds
            return
        for rates in new:
            rates.is_known = True
        each = seconds / len(new)
        self._starts[source] = (self._starts.get(source, each) + each) / 2
        self._pass.start_seconds += seconds

    def observe_drafts(self, sequence: Sequence, drafted: int, accepted: int, source: str = "") -> None:
        """Learn the acceptance: of `drafted` tokens the first `accepted` were accepted. No draft changes nothing."""
        if drafted < 1:
            return
        rates = self._rates_of(sequence, source)
        rates.observe(drafted, accepted)
        rates.last_pass = self.num_passes
        self._pass.drafted += drafted
        self._pass.accepted += accepted
        if id(sequence) in self._pass.probes:
            self._pass.probed += drafted

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Learn that a pass of the model over `rows` rows, drafted tokens included, took `seconds`."""
        self.verify_costs.observe(rows, seconds)
        record, self._pass = self._pass, PassRecord()
        self.num_passes += 1
        if not record.sequences:
            return
        bare = self.verify_costs.seconds(max(1, rows - record.drafted)) if record.drafted else seconds
        self.probe_budget += PROBE_SHARE * bare
        if self.balance is not None:
            self._pay(record, rows, self.balance)

    def _pay(self, record: PassRecord, rows: int, balance: float) -> None:
        """Take the cost of a pass's drafts out of the budgets, and add what was gained."""
        cost, probes = record.asking_seconds, float(balance <= 0)  # probes: the share that probes have of the cost
        if balance < record.start_seconds:
            self.probe_budget -= record.start_seconds
        else:
            balance -= record.start_seconds
        if record.drafted:
            costs, bare = self.verify_costs, rows - record.drafted
            cost += costs.seconds(rows) - costs.seconds(max(1, bare)) + record.drafting_seconds
            cost += self._uncertain_seconds(bare, record.drafted)
            probes = record.probed / record.drafted
            one = costs.seconds(record.sequences)
            balance = min(balance + record.accepted * one / record.sequences, MAX_BALANCE * one)
        self.probe_budget -= probes * cost
        self.balance = balance - (1 - probes) * cost

    def _uncertain_seconds(self, rows: int, more: int) -> float:
        """The seconds that `more` rows may cost beyond the measured time, as far as the measurement is uncertain.

        By chance, additional rows may look free. This would not be corrected for long, because passes without them
        would become rare.
        """
        costs = self.verify_costs
        return costs.seconds(rows) * costs.uncertainty(rows) + costs.seconds(rows + more) * costs.uncertainty(
            rows + more
        )

    def statistics(self) -> dict[str, Any]:
        """Return seconds by rows, drafting seconds, acceptance by source and position, and counts of draft lengths.

        The result can be written as JSON.
        """
        return {
            "verify_seconds": self.verify_costs.to_dict(),
            "draft_seconds": {source: table.to_dict() for source, table in self.draft_costs.items()},
            "acceptance": {name: s.acceptances(len(s.tally.verified)) for name, s in self.sources.items()},
            "lengths": {str(length): self._histogram[length] for length in sorted(self._histogram)},
        }

    def _source(self, source: str) -> SourceRates:
        return self.sources.setdefault(source, SourceRates())

    def _rates_of(self, sequence: Sequence, source: str) -> SequenceRates:
        sources = self._rates.setdefault(sequence, {})
        if source not in sources:
            sources[source] = SequenceRates(self._source(source))
        return sources[source]
