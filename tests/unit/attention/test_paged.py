from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_accel.attention import AttentionBackend
from hf_accel.cache.quantized import INT4, QUANTIZED
from hf_accel.kernels.layouts import PositionBias

from ...devices import device_of
from .backends import each_backend
from .conftest import ANY
from .oracle import assert_close
from .paging import make_case

pytestmark = each_backend

# (queries, keys) of each sequence
LENGTHS: dict[str, list[tuple[int, int]]] = {
    "one token": [(1, 1)],
    "decode": [(1, 13)],
    "decode at a block's end": [(1, 16)],
    "decode of similar lengths": [(1, 13), (1, 9), (1, 20), (1, 1)],
    "decode of very different lengths": [(1, 700), (1, 2), (1, 640), (1, 4)],
    "verify": [(5, 30)],
    "verify, ragged": [(5, 30), (3, 21), (1, 8), (5, 5), (3, 70)],
    "prefill": [(33, 33)],
    "chunk": [(33, 70)],
    "mixed": [(1, 40), (33, 33), (1, 41), (17, 60), (4, 4)],
    "zero lengths": [(0, 0), (1, 5), (0, 9), (2, 0), (1, 3), (0, 0)],
    "more queries than keys": [(4, 2), (4, 7), (30, 10)],
    "all empty": [(0, 0), (0, 0)],
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("window", [None, 1, 3, 16, 1000])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_equals_oracle(backend: AttentionBackend, lengths: str, window: int | None) -> None:
    case = make_case(LENGTHS[lengths], window=window)
    assert_close(case.run(backend), case.expected()[0])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    "extra",
    [{"softcap": 2.0}, {"sinks": torch.tensor([-2.0, 0.0, 1.0, 3.0])}, {"softcap": 2.0, "sinks": torch.ones(4)}],
    ids=["softcap", "sinks", "both"],
)
@pytest.mark.parametrize("lengths", ["decode", "verify, ragged", "mixed", "zero lengths", "more queries than keys"])
def test_softcap_and_sinks(backend: AttentionBackend, lengths: str, extra: dict[str, Any], window: int | None) -> None:
    case = make_case(LENGTHS[lengths], window=window)
    assert_close(case.run(backend, **extra), case.expected(**extra)[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"sinks": torch.ones(4)}], ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lse(backend: AttentionBackend, lengths: str, extra: dict[str, Any]) -> None:
    case = make_case(LENGTHS[lengths])
    out, lse = case.run(backend, return_lse=True, **extra)
    expected, expected_lse = case.expected(**extra)
    assert lse.dtype == torch.float32
    assert_close(out, expected)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("dims, block_size", [((8, 8), 1), ((40, 24), 3), ((64, 64), 16)])
def test_dtypes_groups_and_layouts(
    backend: AttentionBackend, dims: tuple[int, int], block_size: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    case = make_case(LENGTHS["mixed"], dims=dims, heads=heads, block_size=block_size, dtype=dtype)
    scale = dims[0] ** -0.5
    out = case.run(backend, scale=scale)
    assert out.dtype == dtype
    assert_close(out, case.expected(scale=scale)[0], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", ["decode", "decode of similar lengths", "verify, ragged", "mixed", "zero lengths"])
@pytest.mark.parametrize("stored", QUANTIZED)
def test_quantized_pages(
    backend: AttentionBackend, stored: str, lengths: str, window: int | None, dtype: torch.dtype
) -> None:
    case = make_case(LENGTHS[lengths], window=window, dtype=dtype).quantized(QUANTIZED[stored])
    assert (case.k_pages.dtype, case.v_pages.dtype) == QUANTIZED[stored]
    assert_close(case.run(backend), case.expected()[0], dtype=dtype)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("chunk", [1, 5, 32])
def test_chunked_prefill_equals_whole(backend: AttentionBackend, chunk: int, window: int | None) -> None:
    case = make_case([(70, 70)], window=window)
    whole = case.run(backend)
    for start in range(0, 70, chunk):
        stop = min(start + chunk, 70)
        part = replace(case, q=[case.q[0][:, start:stop]], k=[case.k[0][:, :stop]], v=[case.v[0][:, :stop]]).run(
            backend
        )
        assert_close(part, whole[start:stop])


@pytest.mark.parametrize("sinks", [None, torch.tensor([-2.0, 0.0, 1.0, 3.0])], ids=["plain", "sinks"])
def test_parts_over_disjoint_keys_merge(backend: AttentionBackend, sinks: torch.Tensor | None) -> None:
    case = make_case([(1, 40), (1, 23), (1, 9)])
    whole, _ = case.run(backend, return_lse=True, sinks=sinks)
    first = replace(case, k=[x[:, :8] for x in case.k], v=[x[:, :8] for x in case.v])
    rest = replace(
        case, block_table=case.block_table[:, 2:], k=[x[:, 8:] for x in case.k], v=[x[:, 8:] for x in case.v]
    )
    outs, lses = zip(first.run(backend, return_lse=True, sinks=sinks), rest.run(backend, return_lse=True), strict=True)
    shares = torch.softmax(torch.stack(lses), dim=0).unsqueeze(-1)
    assert_close((torch.stack(outs) * shares).sum(0), whole)


def test_shared_blocks(backend: AttentionBackend) -> None:
    """Two sequences with a common prefix in the same blocks."""
    case = make_case([(1, 12), (1, 12)])
    case.block_table[1, :2] = case.block_table[0, :2]
    case.k[1][:, :8], case.v[1][:, :8] = case.k[0][:, :8], case.v[0][:, :8]
    assert_close(case.run(backend), case.expected()[0])


def test_padding_stays_inside_the_table(backend: AttentionBackend) -> None:
    """The window of the longer sequence starts in the table's last column, that of the shorter spans two."""
    case = make_case([(1, 16), (1, 15)], window=4, spare_columns=0)
    assert_close(case.run(backend), case.expected()[0])


def test_no_sequences(backend: AttentionBackend) -> None:
    case = make_case([])
    out, lse = case.run(backend, return_lse=True)
    assert out.shape == (0, 4, 8) and lse.shape == (0, 4)


@pytest.mark.parametrize("trial", range(30))
def test_random_batches(backend: AttentionBackend, trial: int) -> None:
    generator = torch.Generator().manual_seed(trial)

    def below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=generator))

    most = (2, 6, 24)[trial % 3]
    lengths = []
    for _ in range(below(9)):
        num_queries = below(most)
        lengths.append((num_queries, num_queries + below(50)))
    case = make_case(lengths or [(1, 1)], block_size=1 + below(6), window=(None, 1, 5, 20)[below(4)], seed=trial)
    out, lse = case.run(backend, return_lse=True)
    expected, expected_lse = case.expected()
    assert_close(out, expected)
    assert_close(lse, expected_lse)
    assert_close(case.run(backend), expected)


@pytest.mark.parametrize("lengths", ["decode of similar lengths", "verify, ragged", "mixed", "zero lengths", "chunk"])
def test_every_key_is_seen_where_attention_is_not_causal(backend: AttentionBackend, lengths: str) -> None:
    """Several tokens attend to one encoder's output so; which only backends of a CPU are asked for."""
    if "cuda" not in backend.device_types:
        case = make_case(LENGTHS[lengths])
        assert_close(case.run(backend, causal=False), case.expected(causal=False)[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("stored", [None, torch.int8, INT4], ids=str)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("by_distance", [False, True])
@pytest.mark.parametrize(
    "lengths",
    ["decode of similar lengths", "decode of very different lengths", "verify, ragged", "mixed", "zero lengths"],
)
def test_bias_of_positions(
    backend: AttentionBackend, lengths: str, by_distance: bool, window: int | None, stored: torch.dtype | None
) -> None:
    """The numbers of a key's position, or of its distance, are added to the scores; other columns are not read."""
    reason = backend.refuses(replace(ANY, device_type=device_of(backend), bias=True))
    if reason is not None:
        pytest.skip(reason)
    pairs = [(queries, max(queries, keys)) for queries, keys in LENGTHS[lengths]]
    case = make_case(pairs, window=window)
    case = case if stored is None else case.quantized(stored)
    columns = max(keys for _, keys in pairs) + 5
    table = torch.randn(4, columns, generator=torch.Generator().manual_seed(1))
    masks = []
    for queries, keys in pairs:
        places, key = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
        masks.append(
            table[:, columns - 1 - (places - key).clamp(0)] if by_distance else table[:, key.expand(queries, -1)]
        )
    out = case.run(backend, bias=PositionBias(table, by_distance))
    assert_close(out, case.expected(masks=masks)[0])
