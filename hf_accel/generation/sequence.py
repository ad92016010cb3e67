"""A sequence of tokens that is being generated, a draft for it, and a chunk of it."""

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
    WAITING = "waiting"  # for blocks, or because too many sequences run
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """A prompt and the tokens that were generated after it.

    tokens: prompt and generated tokens; all are final. num_computed: how many of the first tokens have K and V in
        `cached`. In a decoding sequence this is all but the last token. After a preemption it is 0, or the length of
        the cached prefix.
    sampling: how the next token is chosen. seed: the seed of the sequence's random numbers.
    stop: is called with the sequence after each new token. It returns None, or the reason why the sequence ends.
    padding, index: the ids before the prompt in the padded batch of generate(), and the prompt's row in that batch.
    priority: sequences with a higher one go first. arrival: the order among equal priorities; the scheduler sets it.
    followers: other samples of the same prompt, which share this sequence's pages.
    keeps_pages: whether the pages are kept when the sequence ends, as kept_pages, which who set it releases.
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
    keeps_pages: bool = False
    kept_pages: CachedSequence | None = None
    notes: dict[str, Any] = field(default_factory=dict)  # state of stop rules and processors for this sequence

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """The number of tokens that may still be generated."""
        return self.max_new_tokens - self.num_new

    @property
    def decodes(self) -> bool:
        """True if the sequence is in decode: only its last token is left to compute, so a pass gives a new token."""
        return self.num_computed == len(self.tokens) - 1 and self.num_new > 0

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED


@dataclass(frozen=True)
class Draft:
    """Tokens that a drafter proposes as the continuation of a sequence.

    probabilities: [len(tokens), V] float32, the distribution that each token was drawn from, after all processing;
        None if the tokens were not drawn, but looked up or chosen greedily.
    source: the name of what proposed the tokens, for statistics; empty for the drafter's own name.
    """

    tokens: list[int] = field(default_factory=list)
    probabilities: Tensor | None = None
    source: str = ""

    def __len__(self) -> int:
        return len(self.tokens)

    def accepted(self, chosen: list[int]) -> list[int]:
        """Return the accepted tokens (the drafted tokens that equal the model's own) and the model's next token.

        chosen: the model's own token at the position of each drafted token, and at the position after them.
        """
        same = 0
        while same < len(self) and self.tokens[same] == chosen[same]:
            same += 1
        return chosen[: same + 1]


@dataclass(frozen=True)
class Chunk:
    """The part of a sequence that a pass computes: `count` tokens from num_computed on. They have slots already."""

    sequence: Sequence
    count: int

    @property
    def reaches_end(self) -> bool:
        """True if the chunk holds the sequence's last token, whose logits choose the next token."""
        return self.sequence.num_computed + self.count == len(self.sequence.tokens)
