"""Records of what was observed of each drafter, and the gains that they let expect of its next drafts."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from weakref import WeakKeyDictionary

from ..sequence import NO_SHAPE, Sequence, Shape
from .acceptance import Tally, gains, likeliest_tree
from .costs import DraftCost
from .drafters.drafter import FEW, UNKNOWN

FIRST_WAIT = 1  # the passes from the first trial to the next
# The weight of an expected acceptance, in verified tokens. The acceptance over all sequences, of about the last 64
# drafts, is what is expected of each, of which the last 16 count.
WEIGHT, SOURCE_MEMORY, SEQUENCE_MEMORY = 4.0, 64.0, 16.0
IDLE_MEMORY = 64.0  # the passes without drafts in which the counts of a sequence fade
HOPE = 1.5  # the standard errors by which the acceptance may be better than it looks
SIBLINGS = 4  # tokens of a tree for each of its levels, as long as it is not known how deep a tree pays
# The siblings of a tree that count, and the part of what is left by those before it that one is expected to have.
MOST_SIBLINGS, SIBLING = 6, 0.3

# Of each token that can be drafted for each sequence, what allocate_trees takes.
Trees = list[list[tuple[float, int]]]


@dataclass
class Drafted:
    """The latest drafts for one sequence. num_read: its tokens behind the last of them; the source has yet to read
    those after it, which costs time once.
    """

    tally: Tally = field(default_factory=partial(Tally, SEQUENCE_MEMORY))
    last_pass: int = -1
    num_read: int = 0

    def ahead(self, sequence: Sequence) -> int:
        """Return how many tokens of its sequence the source reads ahead of a draft; a few are read with it."""
        unread = len(sequence.tokens) - self.num_read
        return unread if unread > FEW else 0


@dataclass
class DraftPlan:
    """The drafts of a source until pass `until`, for passes of the same sequences and as many rows.

    A plan for no drafts holds for any as many sequences.
    """

    sequences: list[Sequence] = field(default_factory=list)
    rows: int = 0
    trees: bool = False
    shapes: list[Shape] = field(default_factory=list)
    until: int = 0
    is_trial: bool = False
    drafts: bool = field(init=False)

    def __post_init__(self) -> None:
        self.drafts = any(shape.nodes for shape in self.shapes)

    @property
    def pays(self) -> bool:
        return self.drafts and not self.is_trial

    def holds_for(self, sequences: abc.Sequence[Sequence], rows: int, *, trees: bool) -> bool:
        if not self.drafts:
            return len(sequences) == len(self.sequences)
        return (rows, trees) == (self.rows, self.trees) and sequences == self.sequences

    def within(self, bounds: list[int]) -> list[Shape]:
        """Return the shapes, or chains of bounds[i] tokens where they are deeper than that."""
        if not self.drafts:
            return [NO_SHAPE] * len(bounds)
        pairs = zip(self.shapes, bounds, strict=True)
        return [shape if shape.depth <= bound else Shape(bound, bound) for shape, bound in pairs]


@dataclass
class DraftSource:
    """The acceptance and the costs of a drafter over all sequences, as far as they were observed.

    tally: of chains, and of the likeliest of siblings in trees. ranks: of the second sibling, the third, and so on.
    """

    tally: Tally = field(default_factory=partial(Tally, SOURCE_MEMORY))
    ranks: list[Tally] = field(default_factory=lambda: [Tally(SOURCE_MEMORY) for _ in range(1, MOST_SIBLINGS)])
    sequences: WeakKeyDictionary[Sequence, Drafted] = field(default_factory=WeakKeyDictionary)
    cost: DraftCost = field(default_factory=DraftCost)
    reading: float | None = None  # seconds to read a token of a sequence
    keeping: float = 0.0  # seconds of a pass for drafts besides drafting: states are kept, and lengths chosen
    expected: float = UNKNOWN  # the acceptance before any draft was verified
    is_free: bool = True
    plan: DraftPlan = field(default_factory=DraftPlan)
    last_paid: int = 0  # the last pass for which drafts were expected to pay
    last_bare: int = 0  # the last of these that went without, so that its time is known
    wait: int = (
        FIRST_WAIT  # the passes from a trial to the next, which double from FIRST_WAIT on where no hope is left
    )
    next_trial: int = 0
    last_trial: int = -(10**9)  # that did not pay
    # Of this pass:
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    kept: float = 0.0

    def of(self, sequence: Sequence) -> Drafted:
        record = self.sequences.get(sequence)
        if record is None:
            record = self.sequences[sequence] = Drafted()
        return record

    def at(self, sequence: Sequence, now: int) -> Drafted:
        """Return the record of a sequence in pass `now`. What was seen of it long ago counts little."""
        record = self.of(sequence)
        if record.last_pass < now:
            record.tally.fade((1 - 1 / IDLE_MEMORY) ** (now - record.last_pass))
            record.last_pass = now
        return record


def expected_gains(
    source: DraftSource, drafted: abc.Sequence[Drafted], bounds: abc.Sequence[int]
) -> list[list[float]]:
    """Return the gains of the next draft of each sequence, of at most bounds[i] tokens."""
    expected: list[float | None] = list(_expected_of_source(source, max(bounds)))
    # A position that the source has rarely drafted is expected to be like the sequence's own position before it.
    seen = sum(verified >= SEQUENCE_MEMORY for verified in source.tally.verified)
    expected = [rate if position < max(1, seen) else None for position, rate in enumerate(expected)]
    pairs = zip(drafted, bounds, strict=True)
    return [gains(one.tally.acceptances(expected[:bound], WEIGHT)) for one, bound in pairs]


def expected_trees(
    source: DraftSource, drafted: abc.Sequence[Drafted], bounds: abc.Sequence[int], most_nodes: int
) -> Trees:
    """Return the tokens of the next draft of each sequence. most_nodes: 0 for chains."""
    chains = expected_gains(source, drafted, bounds)
    if not most_nodes:
        return [[(gain, depth) for depth, gain in enumerate(chain)] for chain in chains]
    trees, shares = [], _shares_of_siblings(source, max(bounds), most_nodes)
    for chain in chains:
        rates = [[gain / before if before else 0.0 for gain, before in zip(chain, [1.0, *chain], strict=False)]]
        left = [1 - rate for rate in rates[0]]
        for share in shares:
            rates.append([part * rest for part, rest in zip(share, left, strict=False)])
            left = [rest - rate for rest, rate in zip(left, rates[-1], strict=True)]
        trees.append(likeliest_tree(rates, most_nodes))
    return trees


def _shares_of_siblings(source: DraftSource, depth: int, most_nodes: int) -> list[list[float]]:
    """Return by rank, from the second sibling on, and by depth which part it has of what those before it leave."""
    left, shares = [1 - rate for rate in _expected_of_source(source, depth)], list[list[float]]()
    for tally in source.ranks[: most_nodes - 1]:
        # What a sibling has of what those before it have left is the same at all depths.
        seen = tally.acceptances([SIBLING * left[0], *[None] * (depth - 1)], WEIGHT)
        shares.append([min(1.0, rate / rest) if rest > 0 else 0.0 for rate, rest in zip(seen, left, strict=True)])
        left = [rest * (1 - share) for rest, share in zip(left, shares[-1], strict=True)]
    return shares


def _expected_of_source(source: DraftSource, depth: int) -> list[float]:
    return source.tally.acceptances([source.expected, *[None] * (depth - 1)], WEIGHT)


def hoped_rate(source: DraftSource) -> float:
    """Return the best acceptance of first tokens that what was seen of them leaves possible."""
    (rate,) = _expected_of_source(source, 1)
    seen = WEIGHT + sum(source.tally.verified[:1])
    return min(1.0, rate + HOPE * sqrt(rate * (1 - rate) / seen))


def hoped_trees(source: DraftSource, bounds: abc.Sequence[int]) -> Trees:
    """Return chains of tokens that are accepted as often as is possible."""
    chain = gains([hoped_rate(source)] * max(bounds))
    return [[(gain, depth) for depth, gain in enumerate(chain[:bound])] for bound in bounds]
