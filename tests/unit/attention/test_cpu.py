"""What only the native backend promises: the same bits whatever stands beside a query, on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.attention import CpuBackend, ReferenceBackend
from hf_accel.attention.contract import AttentionSpec
from hf_accel.cache.quantized import INT4, QUANTIZED, PageDtypes
from hf_accel.errors import UnsupportedError
from hf_accel.hardware import possible_levels
from hf_accel.hardware.device import instruction_sets
from hf_accel.kernels import cpu as kernels
from hf_accel.kernels.layouts import KV, AttentionOptions, Ragged

from .calls import dense
from .oracle import assert_close
from .paging import SCALE, Case, make_case

BACKEND = CpuBackend()
LEVELS = possible_levels(instruction_sets())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STORED = [None, torch.int8, torch.float8_e4m3fn, INT4, QUANTIZED["int8-int4"]]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([-2.0, 0.0, 1.0, 3.0])},
}

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))


@pytest.fixture(params=LEVELS)  # best first
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        with kernels.using_isa(request.param):
            yield request.param
    except UnsupportedError as error:  # this compiler does not know the level
        pytest.skip(str(error))


def stored(case: Case, dtype: torch.dtype | PageDtypes | None) -> Case:
    return case if dtype is None else case.quantized(dtype)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Equal bits, NaN counted as equal to itself."""
    return actual.dtype == expected.dtype and torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("pages", STORED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_equals_oracle(isa: str, window: int | None, dtype: torch.dtype, pages: Any) -> None:
    for number, extra in enumerate(OPTIONS.values()):
        dims = [(8, 8), (34, 18) if pages in STORED[3:] else (33, 17), (64, 40)][number]
        # the last: rows that are computed together end before and behind a multiple of 8, of 16
        lengths = [(1, 40), (4, 23), (0, 9), (1, 1), (19, 19), (12, 35)]
        case = stored(make_case(lengths, window=window, dtype=dtype, dims=dims, seed=number), pages)
        out, lse = case.run(BACKEND, return_lse=True, scale=dims[0] ** -0.5, **extra)
        expected, expected_lse = case.expected(scale=dims[0] ** -0.5, **extra)
        assert_close(out, expected, dtype=dtype)
        assert_close(lse, expected_lse, dtype=torch.float32 if dtype == torch.float32 else dtype)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (7, 1), (6, 2), (17, 1)], ids=str)
@pytest.mark.parametrize("dims", [(1, 1), (7, 100), (128, 64), (65, 31), (512, 512)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_heads_and_dims(heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = make_case([(1, 21), (5, 9)], heads=heads, dims=dims, dtype=dtype, block_size=5)
    scale = dims[0] ** -0.5
    assert_close(case.run(BACKEND, scale=scale), case.expected(scale=scale)[0], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_fp8_is_read(isa: str, dtype: torch.dtype) -> None:
    """The value of the only key is the output, whatever its score."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale, start = torch.ones(1, 1, 1, dtype=dtype), torch.tensor([0, 1], dtype=torch.int32)
    pages = KV(torch.zeros(1, 1, 1, 8).to(numbers.dtype), numbers.view(1, 1, 1, 256), scale, scale)
    ragged = Ragged(start, start[1:], 1, 1, torch.zeros(1, 1, dtype=torch.int32))
    out, _ = BACKEND.paged(torch.zeros(1, 1, 8, dtype=dtype), pages, ragged, AttentionOptions(1.0), return_lse=True)
    assert torch.equal(out.flatten().nan_to_num(999), numbers.to(dtype).nan_to_num(999))


def part(case: Case, sequence: int, start: int, stop: int) -> Case:
    """Queries start..stop-1 of a sequence that began empty, with the keys up to then."""
    k, v = ([x[sequence][:, :stop]] for x in (case.k, case.v))
    table = case.block_table[sequence : sequence + 1]
    return replace(case, q=[case.q[sequence][:, start:stop]], k=k, v=v, block_table=table)


@pytest.mark.parametrize("pages", STORED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_know_what_stands_beside_it(isa: str, dtype: torch.dtype, pages: Any) -> None:
    """Prefill of a whole prompt, in chunks, token by token, in a batch: across the seams of 512 keys too."""
    lengths = [(1100, 1100), (40, 40), (530, 530)]
    case = stored(make_case(lengths, heads=(6, 2), dims=(24, 20), dtype=dtype, block_size=16, seed=1), pages)
    whole = case.run(BACKEND, softcap=4.0, sinks=torch.arange(6.0))
    position = 0
    for sequence, (length, _) in enumerate(lengths):
        rows = whole[position : position + length]
        cuts = sorted(
            {0, 1, 16, 39, length // 2, 511, 512, 513, length - 7, length - 1, length} & {*range(length + 1)}
        )
        for start, stop in [*pairwise(cuts), (0, length)]:
            alone = part(case, sequence, start, stop).run(BACKEND, softcap=4.0, sinks=torch.arange(6.0))
            assert same(alone, rows[start:stop]), (sequence, start, stop)
        position += length


@pytest.mark.parametrize("window", [None, 3, 700])
def test_decode_of_a_batch_equals_each_alone(isa: str, window: int | None) -> None:
    lengths = [(1, n) for n in (1, 2000, 17, 512, 513, 0, 1024, 1500)]
    case = make_case(lengths, heads=(8, 1), dtype=torch.bfloat16, dims=(16, 16), block_size=16, window=window)
    out, lse = case.run(BACKEND, return_lse=True)
    for i in range(len(lengths)):
        one = replace(case, q=[case.q[i]], k=[case.k[i]], v=[case.v[i]], block_table=case.block_table[i : i + 1])
        alone, alone_lse = one.run(BACKEND, return_lse=True)
        assert same(alone, out[i : i + 1]) and same(alone_lse, lse[i : i + 1])


@pytest.mark.parametrize("lengths", [[(1, 3000)], [(300, 700), (1, 900), (3, 1200)]], ids=str)
def test_threads_change_nothing(lengths: list[tuple[int, int]]) -> None:
    case = make_case(lengths, dtype=torch.bfloat16, dims=(64, 64), block_size=16)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(case.run(BACKEND))
    torch.set_num_threads(threads)
    assert same(results[1], results[0]) and same(results[2], results[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_rows_equal_pages(isa: str, dtype: torch.dtype, window: int | None) -> None:
    """Dense and packed attention over K and V themselves, strided as transformers has them."""
    case = make_case([(600, 600), (33, 33)], dtype=dtype, dims=(24, 24), block_size=16, window=window)
    paged = case.run(BACKEND)
    q, k, v = (torch.cat([x.transpose(0, 1) for x in xs]) for xs in (case.q, case.k, case.v))
    options = AttentionOptions(SCALE, window=window)
    ragged = Ragged(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 600, 633], [600, 33])), 600, 600)
    if window is None:  # with one, the cases differ in what the blocks behind it hold
        assert same(BACKEND.packed(q, KV(k, v), ragged, options), paged)
    for start, stop in ((0, 600), (600, 633)):
        own_q, *own = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        assert same(BACKEND.dense(own_q, KV(*own), options)[0], paged[start:stop])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_prompt_equals_reference(dtype: torch.dtype) -> None:
    case = make_case([(900, 1300)], heads=(2, 1), dims=(32, 32), dtype=dtype, block_size=16)
    assert_close(case.run(BACKEND), case.run(ReferenceBackend()), dtype=dtype)


def test_scores_of_any_size() -> None:
    """Large, equal, infinite and missing scores: weights stay within 0..1, NaN stays in its row."""
    q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 600, 8), torch.randn(1, 1, 600, 8)
    q[0, 0, 0] *= 1e4
    q[0, 0, 1] = 0
    q[0, 0, 2, 3] = float("nan")
    k[0, 0, 5] = torch.where(q[0, 0, 3] > 0, -float("inf"), float("inf"))  # a score of -inf for row 3
    k[0, 0, 5] = k[0, 0, 5].nan_to_num(posinf=-1e30, neginf=-1e30) * q[0, 0, 3].sign()
    out = dense(BACKEND, q, k, v, causal=False, scale=1.0)[0, :, 0]
    best = (k[0, 0] @ q[0, 0, 0]).argmax()
    torch.testing.assert_close(out[0], v[0, 0, best])
    assert out[2].isnan().all() and not out[[0, 1, 3]].isnan().any()
    expected = torch.softmax(k[0, 0].double() @ q[0, 0, 3].double(), 0) @ v[0, 0].double()
    assert_close(out[3], expected)


def test_a_prefix_of_nan_keys_reaches_only_those_who_see_it() -> None:
    case = make_case([(12, 12)], heads=(2, 2), dtype=torch.float32)
    before = case.run(BACKEND)
    block, offset = int(case.block_table[0, 2]), 3  # the key of token 11
    case.k_pages[block, :, offset] = float("nan")
    out = case.run(BACKEND)
    assert same(out[:11], before[:11]) and out[11].isnan().all()


@pytest.mark.parametrize("shape", [(0, 1), (3, 0)], ids=str)
def test_tables_of_no_width_and_no_queries(shape: tuple[int, int]) -> None:
    sequences, queries = shape
    cu_q, kv_len = torch.zeros(sequences + 1, dtype=torch.int32), torch.zeros(sequences, dtype=torch.int32)
    ragged = Ragged(cu_q, kv_len, 0, 0, torch.empty(sequences, 0, dtype=torch.int32))
    q, pages = torch.randn(sequences * queries, 4, 8), KV(torch.empty(2, 2, 4, 8), torch.empty(2, 2, 4, 8))
    out, lse = BACKEND.paged(q, pages, ragged, AttentionOptions(1.0), return_lse=True)
    assert out.shape == (0, 4, 8) and lse.shape == (0, 4)


def test_gradients_go_through_torch() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    assert dense(BACKEND, q, k, v, scale=1.0).requires_grad
    with torch.no_grad():
        assert not dense(BACKEND, q, k, v, scale=1.0).requires_grad
    with torch.inference_mode():
        assert dense(BACKEND, q, k, v, scale=1.0).is_inference()


@pytest.mark.parametrize("kv_heads", [3, 8])
def test_heads_that_do_not_divide_are_refused(kv_heads: int) -> None:
    """The kernel would divide by their quotient, which is 0 for more K/V heads than query heads."""
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, kv_heads, 2, 8)
    with pytest.raises(UnsupportedError, match=f"4 query heads cannot share {kv_heads} heads"):
        BACKEND.dense(q, KV(k, k), AttentionOptions(scale=1.0))
    case = make_case([(2, 2)], heads=(4, kv_heads))
    with pytest.raises(UnsupportedError, match=f"4 query heads cannot share {kv_heads} heads"):
        case.run(BACKEND)


@pytest.mark.parametrize("kv_heads", [0, 3, 8])
def test_a_plan_is_told_that_heads_do_not_divide(kv_heads: int) -> None:
    """A model whose checkpoint lacks weights may have no head of keys at all."""
    spec = AttentionSpec(
        dtype=torch.float32, device_type="cpu", head_dim=8, value_dim=8, num_heads=4, num_kv_heads=kv_heads,
        window=None, softcap=None, sinks=False, quantized_kv=False, dropout=False,
    )  # fmt: skip
    assert BACKEND.refuses(spec) == f"4 query heads cannot share {kv_heads} heads of keys and values"
