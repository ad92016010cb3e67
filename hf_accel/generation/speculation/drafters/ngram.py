"""Looks up the last few tokens in the text before them: prompt lookup (Saxena 2023, LLMA 2304.04487)."""

from __future__ import annotations

from collections import abc
from weakref import WeakKeyDictionary

from ....config import positive_int
from ....errors import UnsupportedError
from ...sequence import Draft, Sequence
from .copying import copy_from
from .drafter import Drafter

BITS = 32  # of one token in a key; token ids are below 2^32 - 1


class NgramIndex:
    """For each n, where each n-gram of a growing text was last followed by another token.

    An n-gram is one integer, its tokens (plus one, so that nothing is like the void before the text) side by side.
    The text's last n-gram enters with the token after it, so that a lookup finds earlier ones alone.
    """

    def __init__(self, fewest: int, most: int) -> None:
        self.num_known = 0
        self._gram = 0
        self._masks = [(1 << BITS * n) - 1 for n in range(most, fewest - 1, -1)]
        self._ends: list[dict[int, int]] = [{} for _ in self._masks]

    def learn(self, tokens: abc.Sequence[int]) -> None:
        """Take in what `tokens` has grown by. Constant time a token."""
        gram, longest = self._gram, self._masks[0]
        places = list(zip(self._masks, self._ends, strict=True))
        for end in range(self.num_known + 1, len(tokens)):
            gram = (gram << BITS | tokens[end - 1] + 1) & longest
            for mask, ends in places:
                ends[gram & mask] = end
        self._gram = gram
        self.num_known = max(self.num_known, len(tokens) - 1)

    def find(self, last: int) -> int | None:
        """Where the longest n-gram that the text ends with, `last` being its last token, went on most recently."""
        gram = self._gram << BITS | last + 1
        for mask, ends in zip(self._masks, self._ends, strict=True):
            end = ends.get(gram & mask)
            if end is not None:
                return end
        return None


class NgramDrafter(Drafter):
    """Proposes what followed the most recent earlier occurrence of the text's last tokens: of the `most` last ones if
    they occurred, else of one fewer, down to `fewest`. Constant time and memory a token.
    """

    name = "ngram"
    is_free = True

    def __init__(self, fewest: int = 2, most: int = 5) -> None:
        positive_int("fewest", fewest)
        positive_int("most", most)
        if fewest > most:
            raise UnsupportedError(f"fewest={fewest} tokens to match are more than most={most}")
        self.fewest, self.most = fewest, most
        self._indices: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        return [self._draft(*each) for each in zip(sequences, lengths, strict=True)]

    def _draft(self, sequence: Sequence, length: int) -> Draft:
        tokens = sequence.tokens
        if length < 1 or not tokens:
            return Draft()
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = NgramIndex(self.fewest, self.most)
        index.learn(tokens)
        start = index.find(tokens[-1])
        return Draft() if start is None else Draft(copy_from(tokens, start, length), source=self.name)

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)
