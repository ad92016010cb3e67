"""How many tokens to draft for each sequence: what pays, by measured acceptance and measured time.

The goodput controller of SmartSpec (2406.14066), with each sequence's own acceptance, the whole batch's rows given out
by what they bring, and two balances of time that bound what is lost where drafts are not accepted.
"""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

from ...config import positive_int
from ..sequence import Sequence
from .acceptance_rates import SequenceRates, SourceRates
from .allocation import Allocation, Prices, allocate, no_time
from .break_even import gains
from .cost_table import CostTable

CREDIT = 0.25  # passes that drafting may lose before it has earned any
SURPLUS = 16.0  # most passes of past gains that later losses are set against
PROBING = 0.01  # part of the time that goes into finding out whether drafts pay by now
MOST_PROBING = 2.0  # most passes that are saved up for it
UNKNOWN_DRAFTING = 0.3  # passes that a drafted token is taken to cost before it was measured
REFRESH = 64  # passes after which another width than the best is tried


@dataclass
class PassRecord:
    """What was decided for the pass to come, and what came of it."""

    sequences: int = 0  # that decode
    probes: set[int] = field(default_factory=set)  # ids of the sequences drafted for just to find out
    drafted: int = 0
    probed: int = 0
    accepted: int = 0
    drafting_seconds: float = 0.0


class Controller:
    """Chooses draft lengths. For each pass: `lengths` (once for each source of drafts), `observe_drafting` if a model
    drafted, `observe_drafts` for each sequence that had a draft, `observe_pass` last.

    num_draft: so many tokens always, as far as limits allow; "auto": what makes new tokens come fastest, up to
    max_draft, none included. Before anything is known of a source it gets one token at a time; a draft may be twice as
    long as the longest accepted one. What is learnt of a source serves all later sequences.

    Whatever acceptance is, not drafting at all would be faster by little: losses are paid from `balance`, which starts
    with CREDIT passes and grows by gains alone; at zero there is no draft but probes, paid from PROBING of the time.
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
        self.probing = 0.0  # seconds
        self._probe_price = 0.0  # seconds, of the last probe that there was no time for
        self._refreshed = 0
        self._refresh_up = False

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
        """Tokens to draft for each of `sequences`, all of which decode in the coming pass.

        limits: the most for each (blocks, tokens left). other_rows: of the pass, computed whatever is drafted here:
        prefill, and sequences that have a draft from another source, with it. is_free: drafting costs no pass of a
        model. source: who will draft; acceptance and cost are learnt for each.
        """
        self._pass.sequences = max(self._pass.sequences, len(sequences))
        if self.num_draft != "auto":
            lengths = [max(0, min(self.num_draft, limit)) for limit in limits]
        else:
            longest = min(self.max_draft, self._source(source).longest_draft)
            bounds = [max(0, min(limit, longest)) for limit in limits]
            lengths = self._choose(sequences, bounds, other_rows, is_free=is_free, source=source)
        self._histogram.update(lengths)
        return lengths

    def _choose(
        self, sequences: abc.Sequence[Sequence], bounds: list[int], other_rows: int, *, is_free: bool, source: str
    ) -> list[int]:
        nothing = [0] * len(bounds)
        count = self._pass.sequences
        rows = len(sequences) + other_rows
        costs = self.verify_costs
        if not any(bounds) or not costs.knows(rows):
            return nothing  # the pass itself shows what it costs without drafts
        if self.balance is None:
            self.balance = CREDIT * costs.seconds(count)
        if self.balance <= 0 and self.probing < self._probe_price:
            return nothing  # no need to reckon: in a small model that would cost as much as a draft
        draft = no_time if is_free else self._drafting(source, count)
        prices = Prices(count, rows - count, costs.seconds, draft, alone=costs.knows(count))
        rates = [self._rates_of(sequence, source) for sequence in sequences]
        elsewhere = self._source(source).acceptances(max(bounds))
        chains = [gains(r.acceptances(elsewhere[:bound])) for r, bound in zip(rates, bounds, strict=True)]
        best = allocate(chains, prices)
        lengths = self._refresh(best, bounds, chains, prices)
        if self.balance <= 0:
            lengths = nothing
        return self._probe(sequences, lengths, bounds, rates, prices=prices)

    def _drafting(self, source: str, sequences: int) -> Callable[[int], float]:
        table = self.draft_costs.get(source)
        if table is not None and table.widths:
            return table.seconds
        unknown = UNKNOWN_DRAFTING * self.verify_costs.seconds(sequences)
        return lambda rows: unknown

    def _refresh(self, best: Allocation, bounds: list[int], chains: list[list[float]], prices: Prices) -> list[int]:
        """The best lengths; once in a while none or twice as many, unless much worse, to see what it costs now."""
        if self.num_passes - self._refreshed < REFRESH or not any(best.lengths):
            return best.lengths
        more = [min(2 * length + 1, bound) for length, bound in zip(best.lengths, bounds, strict=True)]
        other = more if self._refresh_up else [0] * len(bounds)
        loss = self._loss(best, other, chains, prices)
        self._refreshed = self.num_passes
        self._refresh_up = not self._refresh_up
        if loss > self.probing:
            return best.lengths
        self.probing -= loss
        return other

    def _loss(self, best: Allocation, other: list[int], chains: list[list[float]], prices: Prices) -> float:
        """Seconds that other lengths than the best are expected to lose."""

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
        """One token for sequences that have none, those that waited longest first, while there is time for it."""
        idle = [i for i, (length, bound) in enumerate(zip(lengths, bounds, strict=True)) if bound and not length]
        if not idle or self.probing <= 0:
            return lengths
        probed = list(lengths)
        before = prices.extra(lengths) - self._uncertain_seconds(prices.rows + sum(lengths), 1)
        for i in sorted(idle, key=lambda i: rates[i].last_pass):
            probed[i] = 1
            self._probe_price = prices.extra(probed) - before
            if self._probe_price > self.probing:
                probed[i] = 0
                break
            self._pass.probes.add(id(sequences[i]))
        return probed

    # -- after it --------------------------------------------------------------------------------------

    def observe_drafting(self, tokens: int, passes: int, seconds: float, source: str = "") -> None:
        """`passes` of a drafter, one after the other, gave `tokens` tokens in all. Passes that only caught up with
        what was accepted (a prompt) belong to neither."""
        if passes < 1:
            return
        width = max(1, round(tokens / passes))
        table = self.draft_costs.setdefault(source, CostTable())
        table.observe(width, seconds / passes)
        self._pass.drafting_seconds += passes * table.seconds(width)

    def observe_drafts(self, sequence: Sequence, drafted: int, accepted: int, source: str = "") -> None:
        """Of `drafted` tokens the first `accepted` were right. Nothing drafted is no news."""
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
        """A pass of the model over `rows` flattened rows, drafted ones included, took so many seconds."""
        self.verify_costs.observe(rows, seconds)
        record, self._pass = self._pass, PassRecord()
        self.num_passes += 1
        if not record.sequences:
            return
        costs = self.verify_costs
        bare = costs.seconds(max(1, rows - record.drafted))
        one = costs.seconds(record.sequences)
        self.probing = min(self.probing + PROBING * bare, MOST_PROBING * one)
        if self.balance is None or not record.drafted:
            return
        uncertain = self._uncertain_seconds(rows - record.drafted, record.drafted)
        cost = costs.seconds(rows) - bare + uncertain + record.drafting_seconds
        paid = cost * record.probed / record.drafted
        self.probing -= paid
        self.balance += record.accepted * one / record.sequences - (cost - paid)
        self.balance = min(self.balance, SURPLUS * one)

    def _uncertain_seconds(self, rows: int, more: int) -> float:
        """Seconds that `more` rows may cost beyond what the table says.

        The table may call them free by chance, and would do so for long, as passes without them become rare.
        """
        costs = self.verify_costs
        return costs.seconds(rows) * costs.uncertainty(rows) + costs.seconds(rows + more) * costs.uncertainty(
            rows + more
        )

    def statistics(self) -> dict[str, Any]:
        """JSON-able: seconds over rows, drafting seconds, acceptance by source and position, lengths chosen."""
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
