"""Says which tokens may come next in a text that must match something, for sampling and for drafts."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...tensors import sent
from .processors import Prefixes, Processor

MOST_MASKS = 32  # masks of the latest positions: a draft's, and then those of its verification
ALLOWED = (torch.arange(256)[:, None] >> torch.arange(8) & 1).bool()  # by the byte of a mask
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of so many bytes


class Matcher(Protocol):
    """The part of llguidance's LLMatcher that is used. It follows the tokens of one answer."""

    def deep_copy(self) -> Matcher: ...

    def validate_tokens(self, tokens: list[int]) -> int: ...

    def consume_tokens(self, tokens: list[int]) -> bool: ...

    def rollback(self, num_tokens: int) -> bool: ...

    def compute_bitmask(self) -> bytes: ...

    def compute_ff_tokens(self) -> list[int]: ...

    def is_stopped(self) -> bool: ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...


class Constraint:
    """Says which token may follow the new tokens of one sequence.

    All that it answers is a function of the tokens that it is asked about. The matcher goes on or back to them, so
    that drafts, preemptions and beams need nothing of their own. One thread may use it at a time.
    """

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._taken: list[int] = []  # what the matcher has read
        self._masks: dict[int, bytes] = {}  # by the number of tokens before them, which are the first of those

    def fork(self) -> Constraint:
        """Return a constraint for another answer, which begins where this one is."""
        other = Constraint(self._matcher.deep_copy())
        other._taken, other._masks = list(self._taken), dict(self._masks)
        return other

    def follow(self, tokens: abc.Sequence[int]) -> int:
        """Let the matcher read these tokens of the answer. Returns how many of the first of them may stand there."""
        wanted, taken = list(tokens), self._taken
        same = len(taken)
        if wanted[:same] != taken:
            pairs = enumerate(zip(taken, wanted, strict=False))
            same = next((at for at, (one, other) in pairs if one != other), min(same, len(wanted)))
            self._matcher.rollback(len(taken) - same)
            self._masks = {at: mask for at, mask in self._masks.items() if at <= same}
            self._taken = taken[:same]
        if (rest := wanted[same:]) and not self._matcher.is_stopped():
            rest = rest[: self._matcher.validate_tokens(rest)]
            if rest and self._matcher.consume_tokens(rest):
                self._taken += rest
        self._check()
        return len(self._taken)

    def mask(self, tokens: abc.Sequence[int]) -> bytes | None:
        """Return a bit for each token, the lowest first: whether it may follow these tokens of the answer.

        None if they cannot stand there themselves, which happens after a drafted token that will be rejected. Raises
        UnsupportedError if the text is too hard to follow here.
        """
        count = len(tokens)
        if (known := self._masks.get(count)) is not None and self._taken[:count] == list(tokens):
            return known
        if self.follow(tokens) < count:
            return None
        found = self._matcher.compute_bitmask()
        self._check()
        self._masks[count] = found
        while len(self._masks) > MOST_MASKS:
            del self._masks[min(self._masks)]
        return found

    def forced(self, tokens: abc.Sequence[int]) -> list[int]:
        """Return the tokens that must follow these: the masks of their positions allow them alone."""
        if self.follow(tokens) < len(tokens) or self._matcher.is_stopped():
            return []
        return self._matcher.compute_ff_tokens()

    def is_complete(self, tokens: abc.Sequence[int]) -> bool:
        """Return whether the answer is complete after these tokens, so that nothing may follow but its end."""
        return self.follow(tokens) == len(tokens) and self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UnsupportedError(
                f"the text that the answer must match is too hard to follow after {len(self._taken)} tokens: "
                f"{short(self._matcher.get_error())}; ask for a simpler schema, regex or grammar"
            )


def short(error: str) -> str:
    """Return the first lines of a matcher's message as one, without the state that it adds."""
    lines = [line.strip() for line in error.partition("<state>")[0].splitlines()]
    return " ".join(line for line in lines if line and line != "<non-verbose/>")[:300]


@dataclass(frozen=True)
class Constrained(Processor):
    """Excludes the tokens that the constraint of a row's sequence does not allow; other sequences keep all."""

    uses_prefix: ClassVar[bool] = True

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        masks: list[bytes | None] = []
        for prefix in prefixes:
            constraint = None if prefix.sequence is None else prefix.sequence.constraint
            new = [*prefix.committed[prefix.num_prompt :], *prefix.drafted]
            masks.append(None if constraint is None else constraint.mask(new))
        return only_allowed(scores, masks)


def only_allowed(scores: Tensor, masks: abc.Sequence[bytes | None]) -> Tensor:
    """Return scores [n, V] with -inf where the mask of a row has no bit, or ends before; None excludes nothing."""
    width = scores.shape[1]
    packed = torch.full((len(masks), -(-width // 8)), 255, dtype=torch.uint8)
    for row, mask in zip(packed, masks, strict=True):
        if mask is not None:
            found = torch.frombuffer(bytearray(mask), dtype=torch.uint8)[: len(row)]
            row[: len(found)], row[len(found) :] = found, 0
    packed = sent(packed, scores)
    # A number is kept, or replaced, by two operations on its bits: where() takes several times as long on a CPU.
    word, places = WORDS[scores.element_size()], packed.view(-1).int()
    kept = -ALLOWED.to(scores.device, word)
    others = torch.where(ALLOWED, 0.0, -torch.inf).to(scores).view(word)
    found, added = (table.index_select(0, places).view(len(masks), -1)[:, :width] for table in (kept, others))
    return found.bitwise_and_(scores.view(word)).bitwise_or_(added).view(scores.dtype)
