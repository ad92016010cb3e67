"""A forward pass over pages: the tokens that it computes, what it writes and reads, and its inputs."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..kernels.layouts import KV, AttentionOptions, Ragged
from ..tensors import integers, packed, views
from .cached_sequence import CachedSequence
from .pool import BlockTable


@dataclass(frozen=True)
class TokenRange:
    """Tokens start..start+count-1 of a sequence, which a pass computes. The sequence has slots for them already.

    write_from: the first token whose K and V the pass writes; 0 means `start`. The tokens before it are in blocks
    that the sequence shares, so they are written already, or by another sequence of the same pass. num_prompt: the
    tokens of the sequence that were given; later ones were generated, which is a difference to some recurrent layers.
    seen: for each token, how many of the sequence's first tokens it attends to; None if to those up to itself.
    seen_in_windows: whether that is so in layers with a sliding window alone, and to those up to itself in all others.
    copied: the tokens before `start` that the pass computes for another sequence, as indices in the pass: their K and
    V are written for this one too. So branches of a tree share the tokens that they begin with.
    """

    sequence: CachedSequence
    start: int
    count: int
    write_from: int = 0
    num_prompt: int = sys.maxsize
    seen: Sequence[int] | None = None
    seen_in_windows: bool = False
    copied: Sequence[int] = ()

    @property
    def span(self) -> range:
        return range(self.start, self.start + self.count)

    @property
    def num_written(self) -> int:
        return self.start + self.count - self.first_written

    @property
    def first_written(self) -> int:
        return (self.write_from or self.start) - len(self.copied)

    def runs(self, *, windowed: bool) -> list[tuple[int, int]]:
        """Return the runs of tokens that attend causally to the first tokens of their sequence: (tokens, attended to).

        A token that sees later ones is a run of its own. windowed: in layers with a sliding window.
        """
        if self.seen is None or (self.seen_in_windows and not windowed):
            return [(self.count, self.start + self.count)]
        runs: list[tuple[int, int]] = []
        for index, attended in enumerate(self.seen, start=self.start + 1):
            grows = bool(runs) and attended == index and runs[-1][1] == index - 1
            runs[-1:] = [(runs[-1][0] + 1, index)] if grows else [*runs[-1:], (1, attended)]
        return runs


class SharedContext(ABC):
    """The ranks among which the blocks of pages are shared out. All keep the same records of all blocks.

    rank, size: of this process, and of all.
    """

    rank: int
    size: int

    @abstractmethod
    def num_own(self, num_blocks: int) -> int:
        """The blocks that pages of a pool of `num_blocks` have here."""

    @abstractmethod
    def narrow(
        self, step: GroupStep, tables: Sequence[BlockTable], spans: Sequence[range], window: int | None
    ) -> GroupStep:
        """Return the part of a GroupStep that belongs to this rank.

        spans: the positions that the pass computes of each sequence.
        """

    @abstractmethod
    def copy(self, pages: KV, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, given as (source, destination), wherever they are."""

    @abstractmethod
    def attend(self, backend: Any, q: Tensor, pages: KV, *, step: GroupStep, options: AttentionOptions) -> Tensor:
        """Attention of q [N, Hq, D] over the blocks of all ranks -> [N, Hq, Dv]. See AttentionBackend.paged."""

    @abstractmethod
    def check_same(self, *inputs: Tensor | None) -> None:
        """Raise LostRankError unless all ranks give the same."""


@dataclass
class GroupStep:
    """The slots that the layers of one group write and read in a forward pass.

    They share a sliding window, so also blocks.

    written: [W] int64, the indices of the tokens that the pass writes, out of its N tokens; None if it writes all of
    them once. A token whose block is shared is written only once, and one that several branches of a draft begin with
    is written for each. slots: [W] int64, where these tokens are written.
    ragged: what attention reads. Its block table and kv_len begin at the first block that the sequence still holds.
    own: the part that attention reads on this rank, where ranks share out the blocks; `slots` and `written` are then
    those of this rank.
    """

    slots: Tensor
    written: Tensor | None
    ragged: Ragged
    own: Any = None


@dataclass
class Step:
    """A forward pass over B sequences with N new tokens in all: what it writes and reads.

    num_columns: Q, the columns of the [B, Q] input. token_columns: [N] int64, the indices of the flattened [B * Q]
        input columns that hold a token; None if all columns do.
    fresh: whether no sequence had tokens before this pass, so that attention needs only the pass's own K and V.
    contiguous: for each group, whether bottom-right causal attention over a sequence's tokens gives the same result as
        attention over its columns. If not (padding on the right, or inside a sliding window), attention needs all
        columns and a mask.
    gathers: whether the cache returns K and V of all columns, as an unpatched model expects, and not its pages.
    looks_ahead: whether some tokens see later ones.
    """

    groups: list[GroupStep]
    num_columns: int
    token_columns: Tensor | None
    fresh: bool
    contiguous: list[bool]
    gathers: bool = False
    looks_ahead: bool = False

    def tokens(self, states: Tensor) -> Tensor:
        """Select the N tokens of the pass from [B, H, Q, D]; returns [N, H, D]."""
        flat = states.transpose(1, 2).flatten(0, 1)
        return flat if self.token_columns is None else flat.index_select(0, self.token_columns)

    def columns(self, tokens: Tensor, batch_size: int) -> Tensor:
        """Put [N, H, D] back into [B, Q, H, D], with zeros in the padding."""
        if self.token_columns is None:
            return tokens.view(batch_size, -1, *tokens.shape[1:])
        out = tokens.new_zeros(batch_size * self.num_columns, *tokens.shape[1:])
        out.index_copy_(0, self.token_columns, tokens)
        return out.view(batch_size, self.num_columns, *tokens.shape[1:])


def written_places(ranges: Sequence[TokenRange]) -> list[int]:
    """Return the indices of the tokens that a pass over these ranges writes, in the order of their slots."""
    places, end = list[int](), 0
    for each in ranges:
        end += each.count
        places += [*each.copied, *range(end - each.num_written + len(each.copied), end)]
    return places


def offsets(lengths: list[int], device: torch.device) -> Tensor:
    """Return where each of B sequences begins if they stand end to end, and the total length: [B + 1] int32."""
    return integers([0, *accumulate(lengths)], dtype=torch.int32).to(device)


@dataclass(frozen=True)
class PassInputs:
    """The tensors of a pass over N tokens. All are on one device.

    ids, positions: [N] int64. keep: [K] int64, the indices of the tokens whose logits are wanted. step: see Step.
    carried: what tokens carry besides their ids (generation.carried.Carried); None for nothing.
    """

    ids: Tensor
    positions: Tensor
    keep: Tensor
    step: Step
    carried: Any = None

    @property
    def tensors(self) -> list[Tensor]:
        groups = self.step.groups
        # All groups have the same queries, so one cu_q.
        found = [self.ids, self.positions, self.keep, *(group.slots for group in groups)]
        found += [group.written for group in groups if group.written is not None]
        found += [groups[0].ragged.cu_q, *(group.ragged.kv_len for group in groups)]
        return found + [group.ragged.block_table for group in groups if group.ragged.block_table is not None]

    def with_tensors(self, tensors: Sequence[Tensor]) -> PassInputs:
        """Return the same pass with other tensors, in the order of `tensors`."""
        given, groups = iter(tensors), self.step.groups
        ids, positions, keep = next(given), next(given), next(given)
        slots = [next(given) for _ in groups]
        written = [None if group.written is None else next(given) for group in groups]
        cu_q, kv_len = next(given), [next(given) for _ in groups]
        tables = [None if group.ragged.block_table is None else next(given) for group in groups]
        moved = [
            GroupStep(
                slots[i],
                written[i],
                group.ragged._replace(cu_q=cu_q, kv_len=kv_len[i], block_table=tables[i]),
                None if group.own is None else group.own.to(ids.device),
            )
            for i, group in enumerate(groups)
        ]
        step = replace(self.step, groups=moved)
        return replace(self, ids=ids, positions=positions, keep=keep, step=step)

    def to(self, device: torch.device) -> PassInputs:
        """Return the same pass on `device`, copied there at once. The tensors are on the host before."""
        if device.type == "cpu":
            return self
        tensors = self.tensors
        return self.with_tensors(views(packed(tensors, device).to(device, non_blocking=True), tensors))
