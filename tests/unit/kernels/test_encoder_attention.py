"""Attention in both directions over ragged rows: windows on both sides, and biases of scores, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.attention import attend
from hf_accel.kernels.layouts import KV, AttentionOptions, Ragged

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
HEADS, KV_HEADS, LONGEST = 4, 2, 600
LENGTHS = [(7, 7), (1, 1), (0, 0), (40, 40), (3, 20), (600, 600)]  # queries and keys; the last needs two splits
SCALE = 0.3


def operands(lengths: list[tuple[int, int]], dtype: torch.dtype, dims: tuple[int, int] = (16, 12)) -> list[Tensor]:
    queries, keys = (sum(column) for column in zip(*lengths, strict=True))
    shapes = [(queries, HEADS, dims[0]), (keys, KV_HEADS, dims[0]), (keys, KV_HEADS, dims[1])]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def starts(column: list[int]) -> Tensor:
    return torch.tensor([0, *column]).cumsum(0).int()


def packed(x: list[Tensor], lengths: list[tuple[int, int]], **extra: Any) -> Tensor:
    queries, keys = ([pair[side] for pair in lengths] for side in (0, 1))
    ragged = Ragged(starts(queries), torch.tensor(keys, dtype=torch.int32), max(queries), max(keys))
    options = AttentionOptions(SCALE, causal=extra.pop("causal", False), window=extra.pop("window", None))
    return attend(x[0], KV(*x[1:]), options, ragged, **extra)


def expected(x: list[Tensor], lengths: list[tuple[int, int]], **extra: Any) -> Tensor:
    """softmax(scale * q k^T + bias, hidden keys at -inf) v in float64, sequence by sequence."""
    queries, keys = ([pair[side] for pair in lengths] for side in (0, 1))
    parts = [tensor.double().split(n) for tensor, n in zip(x, (queries, keys, keys), strict=True)]
    out = []
    for q, k, v in zip(*parts, strict=True):
        k, v = (side.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for side in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * SCALE
        position = torch.arange(len(q))[:, None] + k.shape[1] - len(q)
        distance = torch.arange(k.shape[1])[None] - position
        if len(q) > k.shape[1]:  # the places of queries among biases; windows count from the last key
            position = torch.arange(len(q))[:, None]
        bias, window, ahead = (extra.get(name) for name in ("bias", "window", "ahead"))
        if bias is not None and bias.ndim == 2:
            scores = scores + bias.double()[:, torch.arange(k.shape[1]) - position + bias.shape[1] // 2]
        elif bias is not None:
            scores = scores + bias.double()[:, position, torch.arange(k.shape[1])]
        ahead = 0 if extra.get("causal") else ahead
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        hidden |= False if window is None else distance <= -window
        hidden |= False if ahead is None else distance > ahead
        out.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


def assert_near(out: Tensor, exact: Tensor) -> None:
    limit = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), exact, atol=limit, rtol=limit)


BIASES = {
    "distances": torch.randn(HEADS, 2 * LONGEST + 99),
    "positions": torch.randn(HEADS, LONGEST, LONGEST),
}
MASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "both sides": {"window": 6, "ahead": 5},
    "wide": {"window": 530, "ahead": 20},
    "ahead": {"ahead": 3},
    "causal": {"causal": True},
}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [None, *BIASES])
@pytest.mark.parametrize("mask", MASKS)
def test_against_float64(mask: str, bias: str | None, dtype: torch.dtype) -> None:
    x, extra = operands(LENGTHS, dtype), MASKS[mask] | ({} if bias is None else {"bias": BIASES[bias]})
    assert_near(packed(x, LENGTHS, **extra), expected(x, LENGTHS, **extra))


@pytest.mark.usefixtures("isa")
def test_the_bits_of_a_sequence_are_its_own() -> None:
    x, before = operands(LENGTHS, torch.bfloat16), torch.get_num_threads()
    extra = {"window": 30, "ahead": 29, "bias": BIASES["distances"]}
    together = packed(x, LENGTHS, **extra)
    begin = starts([queries for queries, _ in LENGTHS]).tolist()
    keys = starts([keys for _, keys in LENGTHS]).tolist()
    for i, pair in enumerate(LENGTHS):
        one = [x[0][begin[i] : begin[i + 1]], *(side[keys[i] : keys[i + 1]] for side in x[1:])]
        assert torch.equal(packed(one, [pair], **extra), together[begin[i] : begin[i + 1]])
    try:
        torch.set_num_threads(2)
        assert torch.equal(packed(x, LENGTHS, **extra), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("isa")
def test_a_bias_of_minus_infinity_hides_keys() -> None:
    x, lengths = operands([(33, 33)], torch.float32), [(33, 33)]
    bias = torch.zeros(HEADS, 33, 33).masked_fill(torch.ones(33, 33).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(packed(x, lengths, bias=bias), packed(x, lengths, causal=True), atol=1e-6, rtol=1e-6)
    bias[1, 5] = float("-inf")
    assert packed(x, lengths, bias=bias)[5, 1].eq(0).all()


@pytest.mark.usefixtures("isa")
def test_a_bias_is_read_at_its_strides_and_no_further() -> None:
    """Memory around the bias is NaN, and so is what a query sees of nothing."""
    x, lengths = operands([(21, 21)], torch.float32), [(21, 21)]
    wide = torch.full((HEADS, 24, 60), float("nan"))
    wide[:, 1:22, 30:51] = BIASES["positions"][:, :21, :21]
    given = wide[:, 1:22, 30:51]
    assert torch.equal(packed(x, lengths, bias=given), packed(x, lengths, bias=given.contiguous()))
    table = torch.full((HEADS, 90), float("nan"))
    table[:, 20:61] = torch.randn(HEADS, 41)
    assert_near(packed(x, lengths, bias=table[:, 20:61]), expected(x, lengths, bias=table[:, 20:61]))


@pytest.mark.usefixtures("isa")
def test_a_dense_batch_takes_a_bias_too() -> None:
    q, k, v = torch.randn(2, HEADS, 9, 16), torch.randn(2, KV_HEADS, 9, 16), torch.randn(2, KV_HEADS, 9, 12)
    out = attend(q, KV(k, v), AttentionOptions(SCALE, causal=False), bias=BIASES["positions"])
    rows = [side.transpose(1, 2).flatten(0, 1) for side in (q, k, v)]
    assert_near(out.flatten(0, 1), expected(rows, [(9, 9)] * 2, bias=BIASES["positions"]))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"causal": True, "ahead": 3}, "give one of them"),
        ({"bias": torch.zeros(HEADS, 12, 12)}, r"\(4, 12, 12\) for 4 heads and 20 tokens; it takes"),
        ({"bias": torch.zeros(HEADS, 37)}, "for 4 heads and 20 tokens"),
        ({"bias": torch.zeros(HEADS, 40)}, "for 4 heads and 20 tokens"),
        ({"bias": torch.zeros(1, 20, 20)}, "for 4 heads"),
        ({"bias": torch.zeros(HEADS, 20, 20).half()}, "a bias of torch.float16"),
    ],
    ids=["causal", "small", "short", "even", "heads", "dtype"],
)
def test_refuses(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        packed(operands([(20, 20)], torch.float32), [(20, 20)], **extra)


@pytest.mark.parametrize("bias", BIASES)
def test_queries_of_padding_are_behind_the_keys(bias: str) -> None:
    lengths = [(5, 3), (5, 5), (70, 41), (4, 1)]
    x = operands(lengths, torch.float32)
    assert_near(packed(x, lengths, bias=BIASES[bias]), expected(x, lengths, bias=BIASES[bias]))
    with pytest.raises(UnsupportedError, match="for 4 heads and 70 tokens"):
        packed(x, lengths, bias=torch.zeros(HEADS, 69, 69))
