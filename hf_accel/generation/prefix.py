"""What stands before a token that is being chosen."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .sequence import Sequence


@dataclass(frozen=True)
class Prefix:
    """Everything before the token that is chosen, drafted tokens included.

    committed: the sequence's own final tokens, shared and not to be written to. num_prompt: of them, the prompt's.
    drafted: what a draft puts after them. owner: the sequence.
    """

    committed: list[int]
    num_prompt: int
    drafted: abc.Sequence[int] = ()
    owner: Sequence | None = None

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
        """int64 [len(self)], on the CPU."""
        return torch.tensor(self.tokens, dtype=torch.int64)
