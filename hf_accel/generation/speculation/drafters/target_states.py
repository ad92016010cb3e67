"""Drafts by a head that reads the target's own hidden states (EAGLE, Li et al. 2401.15077; EAGLE-3, 2503.01840)."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ....cache.cached_sequence import CachedSequence
from ....cache.step import Step, TokenRange
from ...sequence import NO_DRAFT, Draft, Sequence
from .model import MAX_CHUNK, ModelDrafter, PartialDraft, Past

MOST_WAITING = 4096  # tokens whose states wait to be read while nothing is drafted; beyond these the first are dropped


class HeadCalls(Protocol):
    """Calls a draft head."""

    def own_states(self) -> Tensor:
        """Return the head's own last hidden states of the last call, [N, H]."""

    def narrow(self, states: Tensor) -> Tensor:
        """Return the states [N, H] that the head reads for those of the target, [N, C]."""

    def read(self, states: Tensor, ids: list[int], positions: list[int], *, step: Step, keep: list[int]) -> Tensor:
        """Compute N tokens with the states [N, H] that the head reads them with; returns logits [len(keep), V]."""


@dataclass
class ReadStates:
    """A head has read this of a sequence: at a position the target's state there, and the token after it.

    cached: the pages of the head. first: the first position that was read. final: how many were read since. waiting:
    the states [n, H] of the positions after these, of which the head has read none yet.
    """

    cached: CachedSequence
    first: int
    final: int = 0
    waiting: list[Tensor] = field(default_factory=list)

    @property
    def next(self) -> int:
        """Return the first position that the head has not read."""
        return self.first + self.final

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting))

    @property
    def end(self) -> int:
        """Return the first position of which no state is known."""
        return self.next + self.num_waiting

    def cut(self, end: int) -> None:
        """Drop the states at `end` and behind, which are those of drafted tokens that were rejected."""
        kept = max(0, end - self.next)
        if kept < self.num_waiting:
            self.waiting = [torch.cat(self.waiting)[:kept]] if kept else []


class HeadDrafter(ModelDrafter):
    """Drafts token by token with a head of the target. Its first pass reads all states that wait.

    A sequence whose first tokens came from a shared prefix has no states of them; the head then attends to fewer
    tokens than the target does.

    calls: the runner of the head, which is the runner of this ModelDrafter. layers: the target's states that it reads.
    """

    name = "draft head"

    def __init__(self, calls: HeadCalls, layers: tuple[int, ...], *arguments: Any, **keywords: Any) -> None:
        runner: Any = calls
        super().__init__(runner, *arguments, **keywords)
        self.calls, self.layers = calls, layers
        self._read: dict[Sequence, ReadStates] = {}

    def watch(self, sequence: Sequence, start: int, states: Tensor) -> None:
        past = self._read.get(sequence)
        if past is not None:
            past.cut(start)
        if past is None or start > past.end:
            self.forget(sequence)
            past = self._read[sequence] = ReadStates(self.pages.begin(), start)
        new = states[past.end - start :]
        if len(new):
            past.waiting.append(self.calls.narrow(new))
        if past.num_waiting > MOST_WAITING:
            past.cached.truncate(0)
            kept = torch.cat(past.waiting)[-MOST_WAITING // 2 :]
            past.first, past.final, past.waiting = past.end - len(kept), 0, [kept]

    def forget(self, sequence: Sequence) -> None:
        past = self._read.pop(sequence, None)
        if past is not None:
            past.cached.release()

    def catch_up(self, sequences: abc.Sequence[Sequence]) -> None:
        """Read all states but the last MAX_CHUNK, as many in a pass."""
        for sequence in sequences:
            past = self._ready(sequence)
            while past is not None and past.num_waiting > MAX_CHUNK:
                whole = torch.cat(past.waiting)
                part = PassPart(past, whole[:MAX_CHUNK], sequence.tokens[past.next + 1 : past.next + 1 + MAX_CHUNK])
                self._pass_over([part])
                past.final, past.waiting = past.final + MAX_CHUNK, [whole[MAX_CHUNK:]]

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        self.catch_up(sequences)
        drafts: dict[Sequence, PartialDraft] = {}
        for sequence, length in zip(sequences, lengths, strict=True):
            past = self._ready(sequence)
            if past is not None and length:
                drafts[sequence] = PartialDraft(sequence, Past(past.cached), length)
        self._drafted_by_head(sorted(drafts.values(), key=lambda draft: -draft.length))
        made = (drafts.get(sequence) for sequence in sequences)
        return [NO_DRAFT if draft is None else Draft(draft.tokens, draft.distribution) for draft in made]

    def _ready(self, sequence: Sequence) -> ReadStates | None:
        """Return what was read of a sequence, if the states of all its tokens but the last are known."""
        past, last = self._read.get(sequence), len(sequence.tokens) - 1
        if past is not None:
            past.cut(last)
        return None if past is None or past.end != last or not past.waiting else past

    def _drafted_by_head(self, drafts: list[PartialDraft]) -> None:
        """Generate drafts, of which the longest come first, so that those that go on are the first rows of a pass."""
        if not drafts:
            return
        pasts = [self._read[draft.sequence] for draft in drafts]
        parts = [
            PassPart(past, torch.cat(past.waiting), draft.sequence.tokens[past.next + 1 :])
            for draft, past in zip(drafts, pasts, strict=True)
        ]
        counts = [len(part.ids) for part in parts]
        last = parts[0].states  # the head's own, from the second pass on
        for number in range(drafts[0].length):
            going = [draft for draft in drafts if draft.length > number]
            if number:
                own = [states[None] for states in last[: len(going)]]
                parts = [
                    PassPart(past, state, draft.tokens[-1:], ahead=count + number - 1)
                    for past, state, draft, count in zip(pasts, own, going, counts, strict=False)
                ]
            logits, last = self._pass_over(parts)
            _, chosen = self._next_tokens(going, self._over_target_vocabulary(logits))
            for draft, token in zip(going, chosen.read(), strict=True):
                draft.tokens.append(token)
        for past, count in zip(pasts, counts, strict=True):
            past.final, past.waiting = past.final + count, []
            past.cached.truncate(past.final)

    def _pass_over(self, parts: list[PassPart]) -> tuple[Tensor, Tensor]:
        """Read parts of sequences; returns the logits [n, V] and the own last hidden states [n, H] of their ends."""
        ids: list[int] = []
        positions: list[int] = []
        ranges, keep = [], []
        for part in parts:
            past, start, count = part.past, part.past.final + part.ahead, len(part.ids)
            self.pages.append(past.cached, count, start=past.final)
            ranges.append(TokenRange(past.cached, start, count))
            ids += self._in_vocabulary(part.ids)
            positions += range(past.first + start, past.first + start + count)
            keep.append(len(ids) - 1)
        states = torch.cat([part.states for part in parts])
        logits = self.calls.read(states, ids, positions, step=self.pages.step(ranges), keep=keep)
        return logits, self.calls.own_states()[keep]


@dataclass
class PassPart:
    """A pass of a head reads this of a sequence: states [n, H], and the n tokens after these.

    ahead: how many positions it has read besides the final ones.
    """

    past: ReadStates
    states: Tensor
    ids: list[int]
    ahead: int = 0
