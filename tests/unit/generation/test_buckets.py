"""Padded passes compute what the pass asked for: the model that hashes what it reads gives the same logits."""

from __future__ import annotations

import random

import pytest
import torch

from hf_accel.cache.pages import HOST, Pages
from hf_accel.cache.step import PassInputs, TokenRange
from hf_accel.generation.buckets import NOT_UNIFORM, PaddedPass, padded
from hf_accel.tensors import packed, views

from .toy import toy_pages


def inputs_of(pages: Pages, held: list[int], counts: list[int], keep: list[int]) -> PassInputs:
    """A pass that computes the last counts[i] of held[i] tokens of each sequence."""
    ranges, positions = [], []
    for tokens, count in zip(held, counts, strict=True):
        sequence = pages.begin()
        pages.append(sequence, tokens)
        ranges.append(TokenRange(sequence, tokens - count, count))
        positions += range(tokens - count, tokens)
    ids = torch.arange(1, len(positions) + 1)
    return PassInputs(ids, torch.tensor(positions), torch.tensor(keep or [0]), pages.step(ranges, HOST))


def check(inputs: PassInputs, found: PaddedPass, pages: Pages, keep: list[int]) -> None:
    """Each token keeps its position, its slot, and what it sees; the rest is padding."""
    bucket, own = found.bucket, found.inputs
    rows = bucket.sequences * bucket.width
    assert own.ids.shape == own.positions.shape == (rows,) and own.step.num_columns == rows
    real = own.ids.nonzero()[:, 0]
    assert own.ids[real].tolist() == inputs.ids.tolist()
    assert own.positions[real].tolist() == inputs.positions.tolist()
    for group, before, after in zip(pages.groups, inputs.step.groups, own.step.groups, strict=True):
        group_rows = torch.ones(rows, dtype=torch.bool)
        group_rows[real] = False
        assert after.slots[real].tolist() == before.slots.tolist()
        assert set(after.slots[group_rows].tolist()) <= {group.pool.num_blocks * group.pool.block_size}
        count = len(before.ragged.kv_len)
        assert after.ragged.kv_len.tolist() == before.ragged.kv_len.tolist() + [0] * (bucket.sequences - count)
        assert after.ragged.cu_q.diff().tolist() == [bucket.width] * bucket.sequences
        table = before.ragged.block_table
        assert table is not None and after.ragged.block_table is not None
        assert after.ragged.block_table[:count, : table.shape[1]].equal(table)
        assert after.ragged.max_q == bucket.width and after.ragged.max_kv >= before.ragged.max_kv
        assert after.ragged.max_kv <= after.ragged.block_table.shape[1] * group.pool.block_size
    # The last token of a sequence is the last of its rows, so that attention counts back from it.
    starts = inputs.step.groups[0].ragged.cu_q.tolist()
    assert [int(real[end - 1]) for end in starts[1:]] == [(i + 1) * bucket.width - 1 for i in range(len(starts) - 1)]
    if bucket.only_last:
        assert own.keep.tolist() == list(range(bucket.width - 1, rows, bucket.width))
        found_rows = own.keep[found.kept]
    else:
        found_rows = torch.tensor(found.kept)
    assert own.ids[found_rows].tolist() == inputs.ids[keep].tolist()


@pytest.mark.parametrize("window", [None, 6])
def test_random_passes(window: int | None) -> None:
    draw = random.Random(0)
    kinds = set()
    for _ in range(100):
        pages = toy_pages(2000, block_size=4, window=window)
        counts = [draw.randint(1, draw.choice([1, 2, 5, 5, 40])) for _ in range(draw.randint(1, 20))]
        held = [count + draw.randint(0, 30) for count in counts]
        ends = torch.tensor(counts).cumsum(0).sub(1).tolist()
        keep = draw.choice([ends, list(range(sum(counts))), sorted(draw.sample(range(sum(counts)), 1))])
        inputs = inputs_of(pages, held, counts, keep)
        found = padded(inputs, len(keep), pages.groups, most_rows=512)
        if isinstance(found, PaddedPass):
            check(inputs, found, pages, keep)
            kinds.add((found.bucket.only_last, found.bucket.width > 1, found.bucket.rows > len(inputs.ids)))
        elif found == NOT_UNIFORM:
            assert len(counts) * max(counts) > sum(counts)
        else:
            assert max(counts) > 16 and keep != ends
    assert len(kinds) >= 5


@pytest.mark.parametrize(
    ("counts", "keep", "most_rows", "why"),
    [
        ([1], [], 512, "a pass without logits"),
        ([513], [512], 10_000, NOT_UNIFORM),
        ([17, 5, 5], [16, 21, 26], 512, NOT_UNIFORM),
        ([17], [15, 16], 512, "a pass with logits for more than the last token of each prompt"),
        ([1] * 9, list(range(9)), 15, NOT_UNIFORM),
        ([8, *[1] * 7], [7], 512, NOT_UNIFORM),
        ([1] * 513, [0], 10_000, NOT_UNIFORM),
    ],
)
def test_no_bucket(counts: list[int], keep: list[int], most_rows: int, why: str) -> None:
    pages = toy_pages(1000, block_size=4, window=None)
    inputs = inputs_of(pages, counts, counts, keep)
    assert padded(inputs, len(keep), pages.groups, most_rows=most_rows) == why


def test_few_shapes() -> None:
    """Growing sequences and batches meet few buckets."""
    buckets = set()
    for count in range(1, 65):
        for held in (1, 9, 33, 100):
            pages = toy_pages(3000, block_size=4, window=None)
            inputs = inputs_of(pages, [held] * count, [1] * count, list(range(count)))
            found = padded(inputs, count, pages.groups, most_rows=512)
            assert isinstance(found, PaddedPass)
            buckets.add(found.bucket)
    assert len(buckets) == 11 * 3


def test_transfer() -> None:
    """All tensors in one buffer, each where a kernel likes it, and back."""
    pages = toy_pages(30, block_size=4, window=6)
    inputs = inputs_of(pages, [5, 9, 1], [1, 3, 1], [0, 3, 4])
    tensors = inputs.tensors
    buffer = packed(tensors, torch.device("cpu"))
    found = views(buffer, tensors)
    assert all(a.equal(b) and a.dtype is b.dtype for a, b in zip(found, tensors, strict=True))
    assert all((view.data_ptr() - buffer.data_ptr()) % 16 == 0 for view in found)
    again = inputs.with_tensors(found)
    assert all(a is b for a, b in zip(again.tensors, found, strict=True))
    assert again.step.groups[1].ragged.max_kv == inputs.step.groups[1].ragged.max_kv
    assert inputs.to(torch.device("cpu")) is inputs
    moved = inputs.to(torch.device("meta"))
    assert {tensor.device.type for tensor in moved.tensors} == {"meta"}
    assert [tensor.shape for tensor in moved.tensors] == [tensor.shape for tensor in tensors]
