"""Drafts from the hidden states of the model itself, which each of its passes hands on."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

from torch import Tensor

from ....fused.state_rows import StateRows, end_to_end
from ...sequence import Draft, Sequence
from .drafter import FEW, TRAINED, Drafter
from .unread_states import StatesBook, UnreadStates

# Continues one sequence. It is called with the final tokens of the sequence; the hidden states [n, D] of n of them,
# which follow on those of the call before; the index of the first of these; and the tokens to draft, which may be 0.
Continue = Callable[[list[int], Tensor, int, int], list[int]]


class HiddenStatesDrafter(Drafter):
    """Drafts with modules that a model was trained with, or a small model, which read hidden states of the model.

    layers: the hidden states that are read, as indices into those that transformers returns. begin: makes a Continue
    for a sequence.
    """

    expected = TRAINED

    def __init__(self, name: str, layers: abc.Sequence[int], begin: Callable[[], Continue]) -> None:
        self.name, self.layers = name, tuple(layers)
        self.book = StatesBook(begin)

    def watch_rows(self, sequence: Sequence, start: int, rows: StateRows) -> None:
        self.book.watch(sequence, start, rows)

    def catch_up(self, sequences: abc.Sequence[Sequence]) -> None:
        for sequence in sequences:
            unread = self.book.ready(sequence)
            if unread is not None and unread.count > FEW:
                _continued(unread, sequence.tokens, unread.count - 1, 0)

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        return [self._draft(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]

    def _draft(self, sequence: Sequence, length: int) -> Draft:
        unread = self.book.ready(sequence)
        if unread is None or length < 1:
            return Draft()
        return Draft(_continued(unread, sequence.tokens, unread.count, length))

    def forget(self, sequence: Sequence) -> None:
        self.book.forget(sequence)


def _continued(unread: UnreadStates[Continue], tokens: list[int], count: int, length: int) -> list[int]:
    """Read the next `count` states; returns at most `length` tokens behind them."""
    start = unread.start
    states = end_to_end(unread.take(count))
    return unread.reader(tokens[: start + count + 1], states, start, length)[:length]
