"""What one forward pass does to the cache, as tensors: the contract between a cache and an attention backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layouts import Ragged


@dataclass
class GroupStep:
    """One forward pass as the layers of one group (same sliding window, so same blocks) see it.

    slots: [number written] int64. written: int64 [number written], which of the N tokens are stored (a token of a
    block that others share is stored once); None: all. ragged: what they read; its block table and kv_len begin at the
    first block that is still held.
    """

    slots: Tensor
    written: Tensor | None
    ragged: Ragged


@dataclass
class Step:
    """One forward pass over B sequences with N new tokens in all.

    token_columns: LongTensor [N], which of the flattened [B * Q] input columns hold a token; None when all do.
    fresh: no sequence has a past, so K and V of this pass are all there is.
    contiguous: per group, whether bottom-right causal attention over a sequence's tokens is attention over its
        columns. Otherwise (padding on the right, or inside a sliding window) attention takes columns and a mask.
    gathers: the cache hands all columns to attention, as in an unpatched model, instead of its pages.
    """

    groups: list[GroupStep]
    num_columns: int
    token_columns: Tensor | None
    fresh: bool
    contiguous: list[bool]
    gathers: bool = False

    def tokens(self, states: Tensor) -> Tensor:
        """[B, H, Q, D] to the N tokens of the pass, [N, H, D]."""
        flat = states.transpose(1, 2).flatten(0, 1)
        return flat if self.token_columns is None else flat.index_select(0, self.token_columns)

    def columns(self, tokens: Tensor, batch_size: int) -> Tensor:
        """[N, H, D] back to [B, Q, H, D], zero in the padding."""
        if self.token_columns is None:
            return tokens.view(batch_size, -1, *tokens.shape[1:])
        out = tokens.new_zeros(batch_size * self.num_columns, *tokens.shape[1:])
        out.index_copy_(0, self.token_columns, tokens)
        return out.view(batch_size, self.num_columns, *tokens.shape[1:])


def offsets(lengths: list[int], device: torch.device) -> Tensor:
    """Lengths of B sequences as [B + 1] int32 starting points."""
    total, starts = 0, [0]
    for length in lengths:
        total += length
        starts.append(total)
    return torch.tensor(starts, dtype=torch.int32, device=device)
