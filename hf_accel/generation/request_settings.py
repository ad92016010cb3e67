"""The settings of a request: all that it asks for besides its prompt, in one object that its sequences share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..linear.adapters import Adapter
    from .sampling.constraint import Constraint
    from .sampling.sampling import Sampling

Stop = Callable[[Any], bool]  # is called with the sequence after each new token; True if it ends there


@dataclass(frozen=True)
class StopRules:
    """Say where a sequence ends: after any of `token_ids`, and where one of `others` returns True."""

    token_ids: frozenset[int] = frozenset()
    others: tuple[Stop, ...] = ()

    def without_end(self, tokens: list[int]) -> list[int]:
        """Return tokens without the one that has ended them, which is no part of what an answer matches."""
        return tokens[:-1] if tokens and tokens[-1] in self.token_ids else tokens


@dataclass(frozen=True, eq=False)
class RequestSettings:
    """All that a request asks for besides its prompt. It is made once, where a request comes in, and handed on whole.

    max_new_tokens: the most tokens that are generated. sampling: how the next token is chosen. stop: where they
    end before. priority: sequences with a higher one go first.
    adapter: what is added to the model's linear layers for the sequences; None for nothing.
    constraint: what the new tokens must match, of which each sequence gets a fork; None for any text.
    keeps_pages: whether the pages are kept when a sequence ends, as its kept_pages, which who set it releases.
    """

    max_new_tokens: int
    sampling: Sampling
    stop: StopRules = StopRules()
    priority: int = 0
    adapter: Adapter | None = None
    constraint: Constraint | None = None
    keeps_pages: bool = False
