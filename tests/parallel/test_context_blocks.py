"""One process plays all ranks: what they find in their shares of the blocks, merged, is attention over all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.attention import BACKENDS, AttentionBackend
from hf_accel.cache.quantized import INT4
from hf_accel.cache.step import GroupStep
from hf_accel.kernels.layouts import KV
from hf_accel.parallel import context
from hf_accel.parallel.context import attend_own, merge_ranks, num_own, own_slots, own_step

from ..unit.attention.oracle import assert_close
from ..unit.attention.paging import Case, make_case

ON_CPU = [backend for backend in BACKENDS if not backend.device_types or "cpu" in backend.device_types]
EACH_BACKEND = pytest.mark.parametrize("backend", ON_CPU, ids=lambda b: b.name)
LENGTHS: dict[str, list[tuple[int, int]]] = {  # (queries, keys) of each sequence
    "one token": [(1, 1)],
    "decode": [(1, 13), (1, 9), (1, 700), (1, 16)],
    "prompt": [(33, 33)],
    "chunk": [(33, 70)],
    "mixed": [(1, 40), (33, 33), (1, 41), (0, 0), (17, 60), (4, 4), (0, 9)],
    "nothing": [(0, 0)],
}


def steps(case: Case, size: int) -> list[GroupStep]:
    """What each rank reads in a pass over the case."""
    block_size, tables, spans = case.k_pages.shape[2], [], []
    for row, (q, k) in enumerate(zip(case.q, case.k, strict=True)):
        num_queries, num_keys = q.shape[1], k.shape[1]
        oldest = 0 if case.window is None else max(num_keys - num_queries - case.window + 1, 0)
        dropped = oldest // block_size if num_queries else 0
        blocks = case.block_table[row, dropped : -(-num_keys // block_size)].tolist() if num_queries else []
        pool = SimpleNamespace(block_size=block_size)
        tables.append(SimpleNamespace(blocks=blocks, num_dropped_blocks=dropped, pool=pool))
        spans.append(range(num_keys - num_queries, num_keys))
    step = GroupStep(torch.empty(0, dtype=torch.int64), None, case.operands()[2])
    all_tables: Any = tables
    return [own_step(step, all_tables, spans, window=case.window, rank=rank, size=size) for rank in range(size)]


def share(pages: Tensor, rank: int, size: int) -> Tensor:
    """A rank's blocks; behind them what was never written, where it has fewer than others."""
    held, own = num_own(len(pages), size), pages[rank::size]
    return torch.cat([own, pages[-1:].expand(held - len(own), *pages.shape[1:])]).contiguous()


def parts(case: Case, backend: AttentionBackend, size: int, **options: Any) -> tuple[tuple[Tensor, Tensor], ...]:
    q, pages, _, asked = case.operands(**options)
    return tuple(
        attend_own(
            backend,
            q,
            KV(*(None if x is None else share(x, rank, size) for x in pages)),  # type: ignore[arg-type]
            part=step.own,
            options=asked if rank == 0 else asked._replace(sinks=None),
        )
        for rank, step in enumerate(steps(case, size))
    )


def merged(case: Case, backend: AttentionBackend, size: int, **options: Any) -> tuple[Tensor, Tensor]:
    outs, lses = zip(*parts(case, backend, size, **options), strict=True)
    return merge_ranks(outs, lses)


@pytest.mark.parametrize("window", [None, 3, 16])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("lengths", LENGTHS)
@EACH_BACKEND
def test_shares_merge_to_the_whole(backend: AttentionBackend, lengths: str, size: int, window: int | None) -> None:
    case = make_case(LENGTHS[lengths], window=window)
    out, lse = merged(case, backend, size)
    expected, expected_lse = case.expected()
    assert_close(out, expected)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn, INT4], ids=str)
@pytest.mark.parametrize("window", [None, 5])
@EACH_BACKEND
def test_layouts_softcap_and_sinks(
    backend: AttentionBackend, window: int | None, stored: torch.dtype | None, dtype: torch.dtype
) -> None:
    case = make_case(LENGTHS["mixed"], heads=(8, 2), dims=(16, 8), block_size=3, window=window, dtype=dtype)
    case = case if stored is None else case.quantized(stored)
    options = {"softcap": 2.0, "sinks": torch.linspace(-2, 3, 8)}
    out, _ = merged(case, backend, 3, **options)
    assert out.dtype is dtype
    assert_close(out, case.expected(**options)[0], dtype=dtype)


def test_a_share_may_be_empty() -> None:
    """Of one block, the other ranks hold nothing: zeros and -inf, which weigh nothing."""
    case = make_case([(1, 3), (5, 4), (2, 4)], spare_blocks=0)
    found = [parts(case, BACKENDS[-1], 5)[rank] for rank in range(5)]
    for row in range(8):
        holders = [lse[row].isfinite().all() for _, lse in found]
        assert sum(holders) <= 1
        assert all(
            (out[row] == 0).all() and lse[row].isneginf().all() for out, lse in found if not lse[row].isfinite().all()
        )


def test_merge_of_nothing_is_nothing() -> None:
    out, lse = merge_ranks([torch.zeros(2, 3, 4)] * 2, [torch.full((2, 3), float("-inf"))] * 2)
    assert not out.any() and lse.isneginf().all()


def test_scores_that_are_far_apart() -> None:
    """exp() of such scores is infinite: the merge only looks at differences."""
    outs = [torch.full((1, 1, 2), value) for value in (1.0, 3.0)]
    out, lse = merge_ranks(outs, [torch.tensor([[500.0]]), torch.tensor([[500.0]])])
    assert_close(out, torch.full((1, 1, 2), 2.0))
    assert_close(lse, torch.tensor([[500.0 + 0.6931472]]))
    assert torch.equal(merge_ranks(outs, [torch.tensor([[-900.0]]), torch.tensor([[900.0]])])[0], outs[1])


def test_gathers_and_scores_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of two blocks and of few rows, the result is the same; sinks count once."""
    case = make_case(LENGTHS["mixed"])
    options = {"sinks": torch.tensor([-2.0, 0.0, 1.0, 3.0])}
    block_bytes = case.k_pages[:1].nbytes + case.v_pages[:1].nbytes
    monkeypatch.setattr(context, "MOST_BYTES", 2 * block_bytes)
    monkeypatch.setattr(context, "MOST_SCORES", 4 * 8 * 3)
    taken = []
    gather = context.gather
    monkeypatch.setattr(context, "gather", lambda *args: taken.append(args[1].numel()) or gather(*args))
    assert_close(merged(case, BACKENDS[-1], 2, **options)[0], case.expected(**options)[0])
    assert max(taken) == 2 and len(taken) > 8


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_slot_is_written_by_one_rank(size: int) -> None:
    slots = torch.randperm(40)[:23]
    found = torch.zeros(len(slots), dtype=torch.int64)
    for rank in range(size):
        index, own = own_slots(slots, block_size=4, rank=rank, size=size)
        found[index] += 1
        assert (own < num_own(10, size) * 4).all() and len(own.unique()) == len(own)
        assert torch.equal((own // 4 * size + rank) * 4 + own % 4, slots[index])
    assert (found == 1).all()


def test_only_tokens_to_be_written_are_narrowed() -> None:
    case = make_case([(4, 4)])
    table: Any = SimpleNamespace(blocks=[1], num_dropped_blocks=0, pool=SimpleNamespace(block_size=4))
    whole = GroupStep(torch.tensor([6, 7]), torch.tensor([2, 3]), case.operands()[2])
    for rank, expected in ((0, []), (1, [2, 3])):
        step = own_step(whole, [table], [range(4)], window=None, rank=rank, size=2)
        assert step.written is not None and step.written.tolist() == expected
        assert step.slots.tolist() == [value for value in (2, 3) if rank == 1]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(150))
def test_random_shapes(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    lengths = [(min(n := draw(0, 90), draw(0, 40)), n) for _ in range(draw(1, 6))]
    kv_heads = draw(1, 4)
    case = make_case(
        lengths,
        block_size=draw(1, 18),
        heads=(kv_heads * draw(1, 5), kv_heads),
        dims=(2 * draw(1, 20), 2 * draw(1, 20)),
        window=None if draw(0, 2) else draw(1, 50),
        seed=seed,
    )
    stored = [None, torch.int8, INT4][draw(0, 3)]
    case = case if stored is None else case.quantized(stored)
    out, lse = merged(case, ON_CPU[draw(0, len(ON_CPU))], draw(1, 9))
    expected, expected_lse = case.expected()
    assert_close(out, expected)
    assert_close(lse, expected_lse)
