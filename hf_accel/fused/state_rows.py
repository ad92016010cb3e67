"""Hidden states of tokens, as the layers of a pass have left them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StateRows:
    """Hidden states of some tokens of one pass, which are not put side by side until somebody needs that.

    layers: [1, N, H] each, of all tokens of the pass. first, count: the rows of these tokens.
    """

    __slots__ = ("count", "first", "layers")

    def __init__(self, layers: tuple[Tensor, ...], first: int, count: int) -> None:
        self.layers, self.first, self.count = layers, first, count

    def __len__(self) -> int:
        return self.count

    def part(self, start: int, count: int) -> StateRows:
        """Return `count` rows from `start` on."""
        return self if count == self.count else StateRows(self.layers, self.first + start, count)

    @classmethod
    def of(cls, states: Tensor) -> StateRows:
        """Return states [n, D] as rows."""
        return cls((states[None],), 0, len(states))

    def tensor(self) -> Tensor:
        """Return the states [n, D], those of the layers side by side."""
        rows = [layer[0, self.first : self.first + self.count] for layer in self.layers]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)


def end_to_end(parts: Sequence[StateRows]) -> Tensor:
    """Return the states [n, D] of parts, end to end."""
    return parts[0].tensor() if len(parts) == 1 else torch.cat([part.tensor() for part in parts])
