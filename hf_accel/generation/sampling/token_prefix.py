"""The prefix of a token that is being chosen."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor


class Tokens(Protocol):
    """The part of a Sequence that a Prefix needs. Its fields are described there."""

    tokens: list[int]
    num_prompt: int
    padding: list[int]
    index: int
    notes: dict[str, Any]
    constraint: Any

    @property
    def num_hidden(self) -> int: ...


@dataclass(frozen=True)
class Prefix:
    """All tokens before the token that is being chosen, drafted tokens included.

    committed: the sequence's final tokens; the list is shared and must not be written to. num_prompt: how many of them
    are the prompt's. drafted: the drafted tokens after them. sequence: the sequence that the tokens belong to.
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
        """All tokens, [len(self)] int64 on the CPU. The tensor must not be written to."""
        if self.sequence is None:
            return torch.tensor(self.tokens, dtype=torch.int64)
        committed = _committed_ids(self.sequence)
        if not self.drafted:
            return committed
        return torch.cat([committed, torch.tensor(self.drafted, dtype=torch.int64)])

    @property
    def columns(self) -> Tensor:
        """The padding of the batch of generate(), which transformers' processors see too, and then the `ids` that were
        given or generated."""
        if self.sequence is None:
            return self.ids
        padding, ids = self.sequence.padding, self.ids[self.sequence.num_hidden :]
        return torch.cat([torch.tensor(padding, dtype=torch.int64), ids]) if padding else ids


def prefix_of(sequence: Tokens, drafted: abc.Sequence[int] = ()) -> Prefix:
    return Prefix(sequence.tokens, sequence.num_prompt, drafted, sequence)


def _committed_ids(sequence: Tokens) -> Tensor:
    """Return the sequence's tokens as a tensor.

    The tensor is kept in the sequence's notes and grows with the tokens, because to convert a long list is slow.
    """
    ids: Tensor
    ids, num_copied = sequence.notes.get("ids", (torch.empty(0, dtype=torch.int64), 0))
    count = len(sequence.tokens)
    if count > len(ids):
        ids = torch.cat([ids[:num_copied], torch.empty(2 * count - num_copied, dtype=torch.int64)])
    if count > num_copied:
        ids[num_copied:count] = torch.tensor(sequence.tokens[num_copied:])
    sequence.notes["ids"] = (ids, count)
    return ids[:count]
