"""One sequence of tokens that is being generated: where it stands, what a pass computes, what is drafted for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ..cache.pages import CachedSequence
    from .sampling.sampling import Sampling


class Status(Enum):
    WAITING = "waiting"  # for blocks, or for a place
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """A prompt and what was generated after it.

    tokens: prompt and generated, all of them final. num_computed: of them, those whose K and V stand in `cached`.
    In a sequence that decodes that is all but the last; after a preemption it is 0 again, or what prefixes are known.
    sampling: how the next token is chosen. seed: of the sequence's own random numbers.
    stop: called with the sequence after each new token; a reason ends it there ("stop", "length").
    padding, index: ids before the prompt in the padded batch of generate(), and its row there. priority: higher goes
    first. arrival: the order among equals, given by the scheduler.
    followers: other samples of the same prompt, which begin from this one's pages.
    keeps: whether the pages outlive the sequence, in kept.
    """

    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop: Callable[[Sequence], str | None] | None = None
    seed: int = 0
    priority: int = 0
    padding: list[int] = field(default_factory=list)
    index: int = 0
    num_prompt: int = field(init=False)
    num_computed: int = 0
    cached: CachedSequence | None = None
    status: Status = Status.WAITING
    finish_reason: str | None = None
    error: BaseException | None = None
    arrival: int = -1
    num_preemptions: int = 0
    followers: list[Sequence] = field(default_factory=list)
    keeps: bool = False
    kept: CachedSequence | None = None
    notes: dict[str, Any] = field(default_factory=dict)  # what its stop rule remembers

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.max_new_tokens - self.num_new

    @property
    def decodes(self) -> bool:
        """Whether only the last token is still to be computed, so that every pass brings a new one."""
        return self.num_computed == len(self.tokens) - 1 and self.num_new > 0

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED


@dataclass(frozen=True)
class Draft:
    """Proposed continuation of a sequence.

    probabilities: [len(tokens), V] float32, the distribution that each token was drawn from, after all processing;
        None for tokens that were not drawn but looked up or taken greedily.
    source: what proposed it, where several could have.
    """

    tokens: list[int] = field(default_factory=list)
    probabilities: Tensor | None = None
    source: str = ""

    def __len__(self) -> int:
        return len(self.tokens)

    def kept(self, chosen: list[int]) -> list[int]:
        """The drafted tokens that equal the model's own, and the first of its own that differs.

        chosen: the model's own token at each drafted place and at the one behind them.
        """
        same = 0
        while same < len(self) and self.tokens[same] == chosen[same]:
            same += 1
        return chosen[: same + 1]


@dataclass(frozen=True)
class Chunk:
    """What a pass computes of a sequence: `count` tokens from num_computed on, which have slots already."""

    sequence: Sequence
    count: int

    @property
    def reaches_end(self) -> bool:
        """Whether its last token's logits choose the next one."""
        return self.sequence.num_computed + self.count == len(self.sequence.tokens)
