"""The answer of a ragged pass to a decoder that asks its cache how many tokens are before those of the pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import NotRaggedError


class TokensBefore:
    """The number of tokens before a pass over many sequences, which is another one for each of its N tokens.

    Decoders add it to counts within the pass. To a count along the columns, [N], each token adds the tokens before
    it, and not those of the pass that belong to other sequences; a count of queries, [N, 1], is the same. In a count
    [1, N] of the tokens that are no padding, each token counts itself alone. An integer, the columns of the pass,
    becomes the largest number of tokens: torch.arange from the tokens before to it are the positions.

    positions: the tokens of its own sequence before each token, [N] int64. first_counts: whether the first token of
    the pass is no padding, which shows from what number a count [1, N] begins; None for 0.
    """

    def __init__(self, positions: Tensor, first_counts: bool | None = None) -> None:
        self.positions, self.first_counts = positions, first_counts

    def __radd__(self, count: Tensor | int) -> Any:
        if not isinstance(count, Tensor):
            return count + int(self.positions.max()) + 1 - len(self.positions)
        if count.ndim == 1 or len(count) > 1:
            return count - torch.arange(len(count), device=count.device).view_as(count) + self.positions.view_as(count)
        first = count.new_zeros(len(count), 1) if self.first_counts is None else count[:, :1] - int(self.first_counts)
        highest = torch.cat([first, count], dim=-1).cummax(-1).values  # code may count padding as the number before 1
        return first + highest.diff(dim=-1) + self.positions

    __add__ = __radd__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if function is not torch.arange or len(args) != 2 or not isinstance(args[0], cls):
            return NotImplemented
        before, end = args
        if end != before + len(before.positions):
            raise NotRaggedError("it counts tokens up to others than those of the pass")
        return before.positions
