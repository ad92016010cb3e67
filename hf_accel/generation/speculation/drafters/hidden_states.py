"""Drafts from the hidden states of the model itself, which each of its passes hands on."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...sequence import Draft, Sequence
from .drafter import Drafter

# Continues one sequence. It is called with the final tokens of the sequence; the hidden states [n, D] of n of them,
# which follow on those of the call before; the index of the first of these; and the tokens to draft, which may be 0.
Continue = Callable[[list[int], Tensor, int, int], list[int]]
FEW = 16  # the most tokens that a draft is asked for together with; more are read ahead of it


@dataclass
class UnreadStates:
    """The hidden states [n, D] of the tokens start..start+n-1 of a sequence, which `go_on` has not read yet."""

    go_on: Continue
    start: int
    states: Tensor

    def add(self, start: int, states: Tensor) -> bool:
        """Add the states of tokens from `start` on, instead of later ones. Returns False if some are missing."""
        kept, skipped = start - self.start, max(0, self.start - start)
        if kept > len(self.states):
            return False
        if skipped < len(states):
            self.states = torch.cat([self.states[: max(0, kept)], states[skipped:]])
        return True

    def read(self, tokens: list[int], count: int, length: int) -> list[int]:
        """Read the states of the first `count` tokens; returns at most `length` tokens behind them."""
        new = count - self.start
        drafted = self.go_on(tokens[: count + 1], self.states[:new], self.start, length)
        self.start, self.states = count, self.states[new:]
        return drafted[:length]


class HiddenStatesDrafter(Drafter):
    """Drafts with modules that a model was trained with, or a small model, which read hidden states of the model.

    A sequence whose first tokens came from a shared prefix is drafted for from the states of the others.

    layers: the hidden states that are read, as indices into those that transformers returns. begin: makes a Continue
    for a sequence.
    """

    def __init__(self, name: str, layers: abc.Sequence[int], begin: Callable[[], Continue]) -> None:
        self.name, self.layers, self.begin = name, tuple(layers), begin
        self._reads: dict[Sequence, UnreadStates] = {}

    def watch(self, sequence: Sequence, start: int, states: Tensor) -> None:
        for each in (sequence, *sequence.followers):
            read = self._reads.get(each)
            if read is None or not read.add(start, states):
                self._reads[each] = UnreadStates(self.begin(), start, states)

    def catch_up(self, sequences: abc.Sequence[Sequence]) -> None:
        for sequence in sequences:
            read = self._known(sequence)
            if read is not None and sequence.num_computed - read.start > FEW:
                read.read(sequence.tokens, sequence.num_computed - 1, 0)

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        return [self._draft(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]

    def _draft(self, sequence: Sequence, length: int) -> Draft:
        read = self._known(sequence)
        if read is None or length < 1:
            return Draft()
        return Draft(read.read(sequence.tokens, sequence.num_computed, length))

    def _known(self, sequence: Sequence) -> UnreadStates | None:
        """Return what is known of a sequence; None if it is not known up to its last token, or nothing is new."""
        read = self._reads.get(sequence)
        if read is None or not read.start < sequence.num_computed <= read.start + len(read.states):
            return None
        return read

    def forget(self, sequence: Sequence) -> None:
        self._reads.pop(sequence, None)
