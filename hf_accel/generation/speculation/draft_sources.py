"""Records of what was observed of each drafter, and the gains that they let expect of its next drafts."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

from ..sequence import Sequence
from .acceptance import Tally, gains, likeliest_tree
from .costs import DraftCost

FIRST_WAIT = 1  # the passes from the first trial to the next
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
    keeping: float = 0.0  # seconds in which a pass keeps what the drafter reads
    is_free: bool = True
    has_hope: bool = False  # whether drafts would pay if they were as often accepted as may still be
    is_tried: bool = False  # whether this pass has a trial
    wait: int = FIRST_WAIT
    next_trial: int = 0  # the pass from which on there may be trials
    idle: tuple[int, int] = (0, 0)  # for so many sequences nothing can be drafted before this pass
    gained: float = 0.0  # seconds that drafts have gained in about the last 96 passes with any; readings are left out
    # Of this pass:
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def of(self, sequence: Sequence) -> Drafted:
        return self.sequences.setdefault(sequence, Drafted())

    def end_pass(self, saved: float, added: float) -> None:
        """Count what the drafts of the pass have gained. saved, added: the seconds that an accepted token saves, and
        those that a drafted one adds to the pass.
        """
        if self.drafted or self.seconds:
            gain = self.accepted * saved - self.drafted * added - self.seconds
            self.gained = (1 - 1 / SOURCE_MEMORY) * self.gained + gain
        self.drafted, self.accepted, self.seconds = 0, 0, 0.0


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
