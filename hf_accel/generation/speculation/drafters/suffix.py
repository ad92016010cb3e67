"""Drafts what followed the longest suffix of the text that occurred before.

The suffix is found with a suffix automaton (Blumer et al. 1985). A longer suffix gives a longer draft, as in
SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

from collections import abc
from weakref import WeakKeyDictionary

from ....errors import UnsupportedError
from ....keywords import positive_int
from ...sequence import Draft, Sequence
from .drafter import Drafter, copy_from

WALK = 32  # the number of repeated suffixes whose latest occurrence is updated at each token


class SuffixAutomaton:
    """The smallest automaton that accepts all substrings of a growing text.

    It has at most 2 states and 3 transitions per token, and adding a token takes amortised constant time.

    A state represents the substrings that end at the same positions. Its link leads to its longest suffix that ends at
    more positions. So the link of the whole text is the longest suffix that occurred before.
    latest: for each state, the end of the latest occurrence of its substrings, not counting the end of the text. It is
    exact for the WALK longest repeated suffixes that have different end positions. For shorter ones it may be an older
    occurrence, because the number of suffixes can grow with the text (as in a^n).
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._latest = [0]
        self._whole = 0  # the state of the whole text

    @property
    def num_states(self) -> int:
        return len(self._link)

    def longest_repeated(self) -> tuple[int, int]:
        """Return the length of the longest suffix that occurred before, and the end of its latest earlier occurrence.

        Both are 0 if no token occurred before.
        """
        state = self._link[self._whole]
        return (self._length[state], self._latest[state]) if state > 0 else (0, 0)

    def extend(self, tokens: abc.Iterable[int]) -> None:
        """Append tokens to the text."""
        following, link, length, latest = self._next, self._link, self._length, self._latest
        whole, size = self._whole, self.num_tokens
        for token in tokens:
            self._age(link[whole], size)
            size += 1
            new = len(link)
            following.append({})
            length.append(size)
            latest.append(size)
            link.append(0)
            state = whole
            while state >= 0 and token not in following[state]:
                following[state][token] = new
                state = link[state]
            if state >= 0:
                target = following[state][token]
                link[new] = target if length[target] == length[state] + 1 else self._split(state, token, target)
            whole = new
        self._whole, self.num_tokens = whole, size

    def _age(self, state: int, end: int) -> None:
        """Set `latest` of the suffixes of the text up to `end`, because a token now follows them."""
        link, latest = self._link, self._latest
        for _ in range(WALK):
            if state <= 0:
                return
            latest[state] = end
            state = link[state]

    def _split(self, state: int, token: int, target: int) -> int:
        """Make a new state for those substrings of `target` that now end at one more position, and return it.

        They are those that `state` reaches by `token`.
        """
        following, link = self._next, self._link
        part = len(link)
        following.append(following[target].copy())
        self._length.append(self._length[state] + 1)
        self._latest.append(self._latest[target])
        link.append(link[target])
        link[target] = part
        while state >= 0 and following[state].get(token) == target:
            following[state][token] = part
            state = link[state]
        return part


class SuffixDrafter(Drafter):
    """Proposes the tokens that followed the longest suffix of the text that occurred before.

    The suffix must have at least `fewest` tokens, and the draft has at most `factor` times as many tokens as the
    suffix. The time per token is amortised constant, and memory is linear in the text.
    Raises UnsupportedError if `factor` is not positive.
    """

    name = "suffix"
    is_free = True

    def __init__(self, fewest: int = 2, factor: float = 1.0) -> None:
        positive_int("fewest", fewest)
        if not factor > 0:
            raise UnsupportedError(f"factor={factor!r} must be positive: drafted tokens for each that matches")
        self.fewest, self.factor = fewest, factor
        self._automata: WeakKeyDictionary[Sequence, SuffixAutomaton] = WeakKeyDictionary()

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        return [self._draft(*each) for each in zip(sequences, lengths, strict=True)]

    def _draft(self, sequence: Sequence, length: int) -> Draft:
        tokens = sequence.tokens
        if length < 1:
            return Draft()
        automaton = self._automata.get(sequence)
        if automaton is None:
            automaton = self._automata[sequence] = SuffixAutomaton()
        automaton.extend(tokens[automaton.num_tokens :])
        matched, end = automaton.longest_repeated()
        if matched < self.fewest:
            return Draft()
        count = min(length, max(1, int(self.factor * matched)))
        return Draft(copy_from(tokens, end, count), source=self.name)

    def forget(self, sequence: Sequence) -> None:
        self._automata.pop(sequence, None)
