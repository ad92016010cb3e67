"""A sequence of tokens that is being generated, when it ends, its drafts and chunks, and the queue where it waits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from torch import Tensor

    from ..cache.cached_sequence import CachedSequence
    from ..cache.kinds import SourceRows
    from .prompt_inputs import PromptInputs, RequestInputs
    from .request_settings import RequestSettings
    from .sampling.constraint import Constraint


class Status(Enum):
    WAITING = "waiting"  # for blocks, or because too many sequences run
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """A prompt and the tokens that were generated after it.

    tokens: prompt and generated tokens; all are final. num_computed: how many of the first tokens have K and V in
        `cached`. In a decoding sequence this is all but the last token. After a preemption it is 0, or the length of
        the cached prefix.
    num_prefilled: the tokens of the prompt that transformers computes before it generates, which is a difference to
        some recurrent layers: all of them, unless a cache that was passed along left one.
    settings: what the request asks for. inputs: what it brings besides its tokens; None if it brings nothing else.
    seed: the seed of the sequence's random numbers. constraint: its own fork of that of the settings.
    padding, index: the ids before the prompt in the padded batch of generate(), and the prompt's row in that batch.
    arrival: the order among equal priorities; the scheduler sets it.
    followers: other samples of the same prompt, which share this sequence's pages, settings and inputs.
    kept_pages: the pages after its end, where the settings say that they are kept.
    joint: the JointChoice that chooses the tokens with those of others, and decides when they end; None without one.
    """

    tokens: list[int]
    settings: RequestSettings
    inputs: RequestInputs | None = None
    seed: int = 0
    padding: list[int] = field(default_factory=list)
    index: int = 0
    num_prompt: int = field(init=False)
    num_prefilled: int = field(init=False)
    constraint: Constraint | None = field(init=False)
    num_computed: int = 0
    cached: CachedSequence | None = None
    status: Status = Status.WAITING
    finish_reason: str | None = None
    error: BaseException | None = None
    arrival: int = -1
    num_preemptions: int = 0
    followers: list[Sequence] = field(default_factory=list)
    kept_pages: CachedSequence | None = None
    joint: Any = None
    notes: dict[str, Any] = field(default_factory=dict)  # state of stop rules and processors for this sequence

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prefilled = len(self.tokens)
        asked = self.settings.constraint
        self.constraint = None if asked is None else asked.fork()

    @classmethod
    def samples(
        cls, tokens: Iterable[int], settings: RequestSettings, seeds: Iterable[int], *, inputs: RequestInputs | None
    ) -> list[Self]:
        """Make the sequences of one prompt, one for each seed. The first of them leads the others."""
        made = [cls(list(tokens), settings, inputs, seed) for seed in seeds]
        made[0].followers = list(made[1:])
        return made

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """The number of tokens that may still be generated."""
        return self.settings.max_new_tokens - self.num_new

    @property
    def decodes(self) -> bool:
        """True if the sequence is in decode: only its last token is left to compute, so a pass gives a new token."""
        return self.num_computed == len(self.tokens) - 1 and self.num_new > 0

    @property
    def prompt_inputs(self) -> PromptInputs | None:
        """Return what the decoder is given for the prompt besides its ids; None for a text."""
        return None if self.inputs is None else self.inputs.prompt

    def forget_asked(self) -> None:
        """Take the last token out of a prompt if it was there to be asked alone, before a new one takes its place."""
        prompt = self.prompt_inputs
        if prompt is None or not prompt.asks:
            return
        assert self.inputs is not None
        self.tokens.pop()
        self.num_prompt, self.num_prefilled = self.num_prompt - 1, self.num_prefilled - 1
        self.inputs = replace(self.inputs, prompt=prompt.without_asked())

    @property
    def source(self) -> SourceRows | None:
        """Return what the tokens attend to besides each other: an encoder's output, or images; None for nothing."""
        if self.inputs is None:
            return None
        return self.inputs.source if self.inputs.prompt is None else self.inputs.prompt.source

    @property
    def num_hidden(self) -> int:
        """Return how many of the first tokens have no ids that anybody gave."""
        return 0 if self.inputs is None else self.inputs.num_hidden

    def contents(self, count: int) -> list[int]:
        """Return the numbers by which the prefix index knows the first `count` tokens: their ids, for text."""
        given = self.prompt_inputs
        known = self.tokens[:count]
        if given is not None:
            known = given.contents[:count] + self.tokens[self.num_prompt : count]
        adapter = self.settings.adapter
        return known if adapter is None else adapter.contents(known)

    def chunk(self, count: int) -> int:
        """Return how many of the next tokens a pass takes if there is room for `count`; see PromptInputs.chunk."""
        given = self.prompt_inputs
        return count if given is None or not count else given.chunk(self.num_computed, count)

    def stop_reason(self) -> str | None:
        """Return "stop" if the sequence ends at its last token, by a rule or as a complete answer; None if not."""
        rules = self.settings.stop
        ends = self.tokens[-1] in rules.token_ids
        if not ends and self.constraint is not None:
            ends = self.constraint.is_complete(self.tokens[self.num_prompt :])
        return "stop" if ends or any(other(self) for other in rules.others) else None

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED


@dataclass(frozen=True)
class Draft:
    """Tokens that a drafter proposes as the continuation of a sequence: one after the other, or a tree.

    probabilities: [len(tokens), V] float32, the distribution that each token was drawn from, after all processing;
        None if the tokens were not drawn, but looked up or chosen greedily.
    source: the name of what proposed the tokens, for statistics; empty for the drafter's own name.
    parents: of each token, the index of the one that it follows among the drafted ones; -1 for the sequence's last
        token. A parent comes before its children, and the likelier one of two children first. None for a chain, where
        each token follows the one before.

    Row 0 of a draft is the sequence's last token, and row j + 1 is drafted token j.
    """

    tokens: list[int] = field(default_factory=list)
    probabilities: Tensor | None = None
    source: str = ""
    parents: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents is None or all(parent == index - 1 for index, parent in enumerate(self.parents))

    @cached_property
    def depths(self) -> list[int]:
        """Return of each row how many drafted tokens lead to it, itself included."""
        if self.parents is None:
            return list(range(len(self) + 1))
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return depths

    @property
    def num_levels(self) -> int:
        """Return the most drafted tokens that can be accepted."""
        return len(self.tokens) if self.parents is None else max(self.depths)

    @cached_property
    def ranks(self) -> dict[int, dict[int, int]]:
        """Return of each row the rows that follow it, with the number of likelier siblings of each."""
        found: dict[int, dict[int, int]] = {}
        for index in range(len(self)):
            own = found.setdefault(index if self.parents is None else self.parents[index] + 1, {})
            own[index + 1] = len(own)
        return found

    def line(self, row: int) -> list[int]:
        """Return the rows that lead from row 0 to this one, both included."""
        if self.parents is None:
            return list(range(row + 1))
        line = [row]
        while line[-1]:
            line.append(self.parents[line[-1] - 1] + 1)
        return line[::-1]

    def prefix(self, row: int) -> list[int]:
        """Return the drafted tokens that lead to a row, its own included."""
        return self.tokens[:row] if self.parents is None else [self.tokens[each - 1] for each in self.line(row)[1:]]

    def kept(self, indices: list[int]) -> Draft:
        """Return the draft of some of the tokens alone. No token is kept whose parent is not."""
        if indices == list(range(len(self))):
            return self
        new = {-1: -1} | {old: index for index, old in enumerate(indices)}
        probabilities = None if self.probabilities is None else self.probabilities[indices]
        parents = None if self.parents is None else tuple(new[self.parents[index]] for index in indices)
        return Draft([self.tokens[index] for index in indices], probabilities, self.source, parents)

    def below(self, limit: int) -> Draft:
        """Return the draft up to each first token that is `limit` or larger, as one that stands for an image is."""
        if not self.tokens or max(self.tokens) < limit:
            return self
        parents = range(-1, len(self) - 1) if self.parents is None else self.parents
        kept = {-1}
        for index, (token, parent) in enumerate(zip(self.tokens, parents, strict=True)):
            if token < limit and parent in kept:
                kept.add(index)
        return self.kept(sorted(kept)[1:])

    def rows(self, chosen: list[int]) -> list[int]:
        """Return row 0 and the rows of those drafted tokens that follow each other as the first of `chosen` do."""
        rows, row = [0], 0
        children = self._children
        while len(rows) <= len(chosen) and (found := children.get((row, chosen[len(rows) - 1]))) is not None:
            row = found
            rows.append(row)
        return rows

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        """Return the row of each drafted token, by the row that it follows and the token."""
        parents = range(-1, len(self) - 1) if self.parents is None else self.parents
        found: dict[tuple[int, int], int] = {}
        for index, (token, parent) in enumerate(zip(self.tokens, parents, strict=True)):
            found.setdefault((parent + 1, token), index + 1)
        return found

    def accepted(self, chosen: list[int]) -> list[int]:
        """Return the accepted tokens (the drafted tokens that equal the model's own) and the model's next token.

        chosen: of each row, the model's own token after it.
        """
        tokens, row = [chosen[0]], 0
        while (found := self._children.get((row, tokens[-1]))) is not None:
            row = found
            tokens.append(chosen[row])
        return tokens


NO_DRAFT = Draft()


class Shape(NamedTuple):
    """The most of a draft: `depth` tokens that follow each other, and `nodes` tokens in all."""

    depth: int
    nodes: int


NO_SHAPE = Shape(0, 0)


@dataclass(frozen=True)
class Chunk:
    """The part of a sequence that a pass computes: `count` tokens from num_computed on. They have slots already."""

    sequence: Sequence
    count: int

    @property
    def reaches_end(self) -> bool:
        """True if the chunk holds the sequence's last token, whose logits choose the next token."""
        return self.sequence.num_computed + self.count == len(self.sequence.tokens)


PATIENCE = 8  # how often the oldest waiting sequence may be overtaken


class WaitingQueue:
    """The waiting sequences, ordered by priority and then by arrival. None of them waits for ever.

    When a sequence is admitted while an older one waits, the oldest one counts as overtaken. After `patience` times
    the oldest one is *promoted*: until it ends, it goes before all sequences that are not promoted, also when blocks
    run out. Every sequence becomes the oldest at some time, so a stream of sequences with a high priority delays the
    others but does not stop them. Only every `patience`-th admission promotes a sequence, so a new sequence with a
    high priority does not wait for a whole backlog of old ones. (It would, if priority rose with waiting time.)
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self.patience = patience
        self._ranked: list[Sequence] = []
        self._by_arrival: list[Sequence] = []
        self._promoted: set[Sequence] = set()
        self._overtaken: dict[Sequence, int] = {}  # how often each was overtaken while it was the oldest

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ranked)

    def rank(self, sequence: Sequence) -> tuple[bool, int, int]:
        """The sort key; the smallest goes first. It changes only by promotion, while the sequence waits."""
        return sequence not in self._promoted, -sequence.settings.priority, sequence.arrival

    @property
    def head(self) -> Sequence:
        return self._ranked[0]

    def add(self, sequence: Sequence) -> None:
        insort(self._ranked, sequence, key=self.rank)
        insort(self._by_arrival, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        del self._ranked[bisect_left(self._ranked, self.rank(sequence), key=self.rank)]
        del self._by_arrival[bisect_left(self._by_arrival, sequence.arrival, key=_arrival)]
        self._overtaken.pop(sequence, None)

    def admit_head(self) -> Sequence:
        """Remove the first sequence and return it. This may promote the oldest one."""
        sequence, oldest = self.head, self._by_arrival[0]
        self.remove(sequence)
        if oldest is not sequence:
            self._overtaken[oldest] = self._overtaken.get(oldest, 0) + 1
            if self._overtaken[oldest] >= self.patience:
                self._promote(oldest)
        return sequence

    def _promote(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self._promoted.add(sequence)
        self.add(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Forget that an ended sequence was promoted."""
        self._promoted.discard(sequence)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
