"""Passes of a few tokens of each sequence, padded to one of few shapes, so that a graph of that shape serves them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import torch
from torch import Tensor

from ..cache.group import PageGroup
from ..cache.step import GroupStep, PassInputs
from ..kernels.layouts import Ragged

SEQUENCES: Final = (1, 2, 4, *range(8, 513, 8))  # as vLLM has them
WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # tokens of each sequence
PROMPT_WIDTHS: Final = (24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
MOST_ROWS: Final = 512
CHEAP_ROWS: Final = 16  # so many rows cost no more than one
LEAST_BLOCKS: Final = 8

NOT_UNIFORM = "a pass with long prompts, or over sequences with very different numbers of tokens"


@dataclass(frozen=True)
class Bucket:
    """A shape of a pass: `width` tokens of each of `sequences` sequences.

    blocks: for each group of layers, the columns of the block table. only_last: whether the logits of each sequence's
    last token alone are wanted.
    """

    sequences: int
    width: int
    blocks: tuple[int, ...]
    only_last: bool

    @property
    def rows(self) -> int:
        return self.sequences * self.width

    @property
    def is_of_prompts(self) -> bool:
        return self.width > WIDTHS[-1]


@dataclass(frozen=True)
class PaddedPass:
    """A pass with the shape of its bucket. kept: the rows of the bucket's logits that the pass asked for."""

    bucket: Bucket
    inputs: PassInputs
    kept: list[int]


def padded(inputs: PassInputs, num_kept: int, groups: Sequence[PageGroup], *, most_rows: int) -> PaddedPass | str:
    """Pad a pass, whose tensors are on the host, to its bucket; or why it has none, as a clause.

    num_kept: how many of inputs.keep count. groups: the pages, which have a scratch block: padding is written there.
    most_rows: the most rows of a bucket.

    Padding stands before the tokens of a sequence. So attention, which is causal from the last query backwards, needs
    the keys that the sequence has, and no others. Sequences that are padding have no keys.
    """
    step, first = inputs.step, inputs.step.groups[0].ragged
    num_tokens, num_sequences, tables = len(inputs.ids), len(first.kv_len), [g.ragged.block_table for g in step.groups]
    if not num_kept:
        return "a pass without logits"
    if any(group.written is not None for group in step.groups) or any(table is None for table in tables):
        return "a pass over blocks that are written by another one"
    if first.max_q > PROMPT_WIDTHS[-1] or num_sequences > SEQUENCES[-1]:
        return NOT_UNIFORM
    sequences, width = _above(SEQUENCES, num_sequences), _above(WIDTHS + PROMPT_WIDTHS, first.max_q)
    rows = sequences * width
    if rows > most_rows or rows > max(CHEAP_ROWS, 2 * width, 2 * num_tokens):
        return NOT_UNIFORM
    # Where no sequence is padded, tokens stay where they are.
    places = None if num_tokens == num_sequences * width else _places(first.cu_q, width)
    kept = _kept(inputs.keep, num_kept, places, num_tokens)
    only_last = width > 1 and all((row + 1) % width == 0 for row in kept)
    blocks = tuple(_power_of_two(0 if table is None else table.shape[1]) for table in tables)
    bucket = Bucket(sequences, width, blocks, only_last)
    if bucket.is_of_prompts and not only_last:
        return "a pass with logits for more than the last token of each prompt"
    padded_groups = [_padded(step.groups[i], bucket, group, i, places=places) for i, group in enumerate(groups)]
    return PaddedPass(
        bucket,
        PassInputs(
            _spread(inputs.ids, places, rows, 0),
            _spread(inputs.positions, places, rows, 0),
            torch.arange(width - 1, rows, width) if only_last else torch.zeros(1, dtype=torch.int64),
            replace(step, groups=padded_groups, num_columns=rows),
        ),
        [row // width for row in kept] if only_last else kept,
    )


def _places(cu_q: Tensor, width: int) -> Tensor:
    """The row of each token, where the last token of each sequence is in the last of its `width` rows."""
    counts = cu_q.diff()
    shifts = torch.arange(1, len(counts) + 1) * width - cu_q[1:]
    return torch.arange(int(cu_q[-1])) + shifts.repeat_interleave(counts)


def _kept(keep: Tensor, num_kept: int, places: Tensor | None, num_tokens: int) -> list[int]:
    if places is not None:
        return cast(list[int], places[keep[:num_kept]].tolist())
    return list(range(num_tokens)) if num_kept == num_tokens else cast(list[int], keep[:num_kept].tolist())


def _padded(part: GroupStep, bucket: Bucket, group: PageGroup, index: int, *, places: Tensor | None) -> GroupStep:
    ragged, columns = part.ragged, bucket.blocks[index]
    assert ragged.block_table is not None
    num_sequences, held = ragged.block_table.shape
    table = ragged.block_table.new_zeros(bucket.sequences, columns)
    table[:num_sequences, :held] = ragged.block_table
    kv_len = ragged.kv_len.new_zeros(bucket.sequences)
    kv_len[:num_sequences] = ragged.kv_len
    cu_q = torch.arange(0, bucket.rows + 1, bucket.width, dtype=torch.int32)
    slots = _spread(part.slots, places, bucket.rows, group.scratch_slot)
    return GroupStep(slots, None, Ragged(cu_q, kv_len, bucket.width, columns * group.pool.block_size, table))


def _spread(values: Tensor, places: Tensor | None, rows: int, padding: int) -> Tensor:
    if places is None and len(values) == rows:
        return values
    out = torch.full((rows,), padding, dtype=values.dtype)
    out[slice(len(values)) if places is None else places] = values
    return out


def _above(sizes: Sequence[int], number: int) -> int:
    return sizes[bisect_left(sizes, number)]


def _power_of_two(number: int) -> int:
    return max(LEAST_BLOCKS, 1 << (number - 1).bit_length())
