"""What stands before a token that is being chosen."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor


class Tokens(Protocol):
    """What a Sequence has before its next token. index: its row in the batch of generate(). notes: what is remembered
    for it."""

    tokens: list[int]
    num_prompt: int
    padding: list[int]
    index: int
    notes: dict[str, Any]


@dataclass(frozen=True)
class Prefix:
    """Everything before the token that is chosen, drafted tokens included.

    committed: the sequence's own final tokens, shared and not to be written to. num_prompt: of them, the prompt's.
    drafted: what a draft puts after them.
    """

    committed: list[int]
    num_prompt: int
    drafted: abc.Sequence[int] = ()
    sequence: Tokens | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.committed) + len(self.drafted)

    @property
    def num_new(self) -> int:
        return len(self) - self.num_prompt

    @property
    def tokens(self) -> list[int]:
        return [*self.committed, *self.drafted]

    @cached_property
    def ids(self) -> Tensor:
        """int64 [len(self)], on the CPU; not to be written to."""
        if self.sequence is None:
            return torch.tensor(self.tokens, dtype=torch.int64)
        committed = _committed_ids(self.sequence)
        if not self.drafted:
            return committed
        return torch.cat([committed, torch.tensor(self.drafted, dtype=torch.int64)])

    @property
    def columns(self) -> Tensor:
        """As `ids`, behind the padding that transformers' own processors would see before them."""
        padding = self.sequence.padding if self.sequence is not None else []
        return torch.cat([torch.tensor(padding, dtype=torch.int64), self.ids]) if padding else self.ids


def prefix_of(sequence: Tokens, drafted: abc.Sequence[int] = ()) -> Prefix:
    return Prefix(sequence.tokens, sequence.num_prompt, drafted, sequence)


def _committed_ids(sequence: Tokens) -> Tensor:
    """The sequence's tokens as a tensor that grows with them: they are final, and a list takes long to convert."""
    room: Tensor
    room, known = sequence.notes.get("ids", (torch.empty(0, dtype=torch.int64), 0))
    count = len(sequence.tokens)
    if count > len(room):
        room = torch.cat([room[:known], torch.empty(2 * count - known, dtype=torch.int64)])
    if count > known:
        room[known:count] = torch.tensor(sequence.tokens[known:])
    sequence.notes["ids"] = (room, count)
    return room[:count]
