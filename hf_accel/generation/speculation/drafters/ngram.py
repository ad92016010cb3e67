"""Prompt lookup: drafts what followed an earlier occurrence of the last tokens (Saxena 2023; LLMA, arXiv
2304.04487)."""

from __future__ import annotations

from collections import abc
from weakref import WeakKeyDictionary

from ....errors import UnsupportedError
from ....keywords import positive_int
from ...sequence import Draft, Sequence
from .drafter import Drafter, copy_from

BITS = 32  # the bits of one token in a key; token ids are below 2^32 - 1


class NgramIndex:
    """For each n from `fewest` to `most`, maps each n-gram of a growing text to the index after its last occurrence.

    The key of an n-gram is one integer that holds the bits of its tokens, each plus one. So no token has the bits 0,
    which stand for positions before the text. The n-gram at the end of the text is added when a token follows it, so
    that a lookup finds only earlier occurrences.
    """

    def __init__(self, fewest: int, most: int) -> None:
        self.num_indexed = 0
        self._gram = 0
        self._masks = [(1 << BITS * n) - 1 for n in range(most, fewest - 1, -1)]
        self._ends: list[dict[int, int]] = [{} for _ in self._masks]

    def extend(self, tokens: abc.Sequence[int]) -> None:
        """Add the new n-grams of `tokens`, the whole text. This takes constant time per new token."""
        gram, longest = self._gram, self._masks[0]
        places = list(zip(self._masks, self._ends, strict=True))
        for end in range(self.num_indexed + 1, len(tokens)):
            gram = (gram << BITS | tokens[end - 1] + 1) & longest
            for mask, ends in places:
                ends[gram & mask] = end
        self._gram = gram
        self.num_indexed = max(self.num_indexed, len(tokens) - 1)

    def find(self, last: int) -> int | None:
        """Return the index after the latest earlier occurrence of the longest n-gram at the text's end, or None.

        last: the last token of the text.
        """
        gram = self._gram << BITS | last + 1
        for mask, ends in zip(self._masks, self._ends, strict=True):
            end = ends.get(gram & mask)
            if end is not None:
                return end
        return None


class NgramDrafter(Drafter):
    """Proposes the tokens that followed the latest earlier occurrence of the text's last tokens.

    It looks up the last `most` tokens, then one token fewer, down to `fewest`. Time and memory per token are constant.
    Raises UnsupportedError if `fewest` is larger than `most`.
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
        index.extend(tokens)
        start = index.find(tokens[-1])
        return Draft() if start is None else Draft(copy_from(tokens, start, length), source=self.name)

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)
