from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_accel.attention import AttentionBackend

from .backends import each_dense_backend
from .calls import dense
from .oracle import assert_close, oracle

SCALE = 0.3

pytestmark = each_dense_backend


def operands(
    num_queries: int,
    num_keys: int,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(num_queries * 1000 + num_keys)
    q = torch.randn(batch, heads[0], num_queries, dims[0])
    k = torch.randn(batch, heads[1], num_keys, dims[0])
    v = torch.randn(batch, heads[1], num_keys, dims[1])
    return q.to(dtype), k.to(dtype), v.to(dtype)


SHAPES = [
    (1, 1),
    (1, 70),
    (2, 2),
    (2, 17),
    (5, 5),
    (5, 64),
    (17, 17),
    (33, 33),
    (33, 70),
    (20, 7),
    (3, 1),
    (1, 0),
    (20, 0),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_oracle(backend: AttentionBackend, shape: tuple[int, int], causal: bool) -> None:
    q, k, v = operands(*shape)
    out = dense(backend, q, k, v, causal=causal, scale=SCALE)
    assert out.dtype == q.dtype
    assert_close(out, oracle(q, k, v, causal=causal, scale=SCALE)[0])


@pytest.mark.parametrize("window", [1, 3, 16, 1000])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(1, 40), (5, 40), (33, 33), (33, 40), (20, 7)], ids=str)
def test_window(backend: AttentionBackend, shape: tuple[int, int], causal: bool, window: int) -> None:
    q, k, v = operands(*shape, batch=1)
    out = dense(backend, q, k, v, causal=causal, scale=SCALE, window=window)
    assert_close(out, oracle(q, k, v, causal=causal, scale=SCALE, window=window)[0])


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("shape", [(1, 9), (5, 9), (33, 33), (20, 7)], ids=str)
def test_softcap_and_sinks(
    backend: AttentionBackend, shape: tuple[int, int], window: int | None, sinks: bool, softcap: float | None
) -> None:
    q, k, v = operands(*shape)
    extra = {"window": window, "softcap": softcap, "sinks": torch.tensor([-2.0, 0.0, 1.0, 3.0]) if sinks else None}
    out = dense(backend, q, k, v, scale=SCALE, **extra)
    assert_close(out, oracle(q, k, v, scale=SCALE, **extra)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (40, 40), (64, 64), (40, 24)], ids=str)
@pytest.mark.parametrize("shape", [(1, 50), (5, 20), (20, 20)], ids=str)
def test_dtypes_groups_and_dims(
    backend: AttentionBackend,
    shape: tuple[int, int],
    dims: tuple[int, int],
    heads: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    q, k, v = operands(*shape, batch=1, heads=heads, dims=dims, dtype=dtype)
    out = dense(backend, q, k, v, scale=dims[0] ** -0.5)
    assert out.dtype == dtype and out.shape == (1, shape[0], heads[0], dims[1])
    assert_close(out, oracle(q, k, v, scale=dims[0] ** -0.5)[0], dtype=dtype)


MASKS = {
    "keys": lambda q, t: torch.rand(2, 1, 1, t) > 0.4,
    "queries and keys": lambda q, t: torch.rand(q, t) > 0.4,
    "per head": lambda q, t: torch.rand(2, 4, q, t) > 0.4,
    "bias": lambda q, t: torch.randn(1, 4, q, t),
    "bias and -inf": lambda q, t: torch.randn(2, 1, q, t).masked_fill(torch.rand(2, 1, q, t) > 0.6, float("-inf")),
    "nothing": lambda q, t: torch.zeros(2, 1, 1, t, dtype=torch.bool),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (True, 4), (False, 4)])
@pytest.mark.parametrize("shape", [(1, 9), (5, 9), (20, 20)], ids=str)
def test_mask_combines_with_causal_and_window(
    backend: AttentionBackend, shape: tuple[int, int], causal: bool, window: int | None, mask: str
) -> None:
    q, k, v = operands(*shape)
    allowed = MASKS[mask](*shape)
    out = dense(backend, q, k, v, mask=allowed, causal=causal, scale=SCALE, window=window)
    assert_close(out, oracle(q, k, v, mask=allowed, causal=causal, scale=SCALE, window=window)[0])


@pytest.mark.parametrize("num_queries", [2, 20])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"sinks": torch.ones(4)}], ids=["plain", "softcap", "sinks"])
def test_row_without_keys_is_zero(backend: AttentionBackend, num_queries: int, extra: dict[str, object]) -> None:
    q, k, v = operands(num_queries, num_queries)
    mask = torch.ones(2, 1, num_queries, num_queries, dtype=torch.bool)
    mask[0, 0, 1] = False
    out = dense(backend, q, k, v, mask=mask, causal=True, scale=SCALE, **extra)
    assert torch.equal(out[0, 1], torch.zeros_like(out[0, 1]))
    assert not out.isnan().any() and out[1, 1].abs().min() > 0


@pytest.mark.parametrize("shape", [(600, 600), (300, 700), (700, 300)], ids=str)
@pytest.mark.parametrize("extra", [{}, {"window": 40}, {"softcap": 2.0}], ids=["plain", "window", "softcap"])
def test_blocks_of_rows_join(backend: AttentionBackend, shape: tuple[int, int], extra: dict[str, float]) -> None:
    """Long prompts run in blocks of rows; the rows around the seams must not notice."""
    q, k, v = operands(*shape, batch=1, heads=(2, 1))
    out = dense(backend, q, k, v, scale=SCALE, **extra)
    shift = shape[1] - shape[0]
    for row in (0, 255, 256, 257, 299, shape[0] - 1):
        used = max(row + shift + 1, 0)
        expected = oracle(q[:, :, row : row + 1], k[:, :, :used], v[:, :, :used], scale=SCALE, **extra)[0]
        assert_close(out[:, row : row + 1], expected)


@pytest.mark.parametrize("batch, num_queries", [(0, 1), (0, 20), (2, 0)])
def test_nothing_to_do(backend: AttentionBackend, batch: int, num_queries: int) -> None:
    q, k, v = operands(num_queries, 20, batch=batch)
    assert dense(backend, q, k, v, scale=SCALE).shape == (batch, num_queries, 4, 8)


def test_strided_operands(backend: AttentionBackend) -> None:
    """transformers hands in transposed views of [B, Q, H, D]."""
    q, k, v = operands(20, 20)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not views[0].is_contiguous()
    for rows in (slice(None), slice(19, None)):
        expected = dense(backend, q[:, :, rows], k, v, scale=SCALE)
        actual = dense(backend, views[0][:, :, rows], *views[1:], scale=SCALE)
        assert_close(actual, expected)


GRADIENT_CASES = {
    "few": ((3, 9), {}),
    "square": ((20, 20), {}),
    "bottom right": ((20, 30), {}),
    "window": ((20, 20), {"window": 4}),
    "softcap": ((20, 20), {"softcap": 2.0}),
    "sinks": ((20, 20), {"sinks": torch.tensor([-2.0, 0.0, 1.0, 3.0])}),
    "rows without keys": ((20, 20), {"mask": (torch.arange(20) > 5).expand(2, 1, 1, 20)}),
    "few rows without keys": ((9, 9), {"mask": (torch.arange(9) > 5).expand(2, 1, 1, 9)}),
}


@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_gradients_equal_oracle(backend: AttentionBackend, case: str) -> None:
    shape, extra = GRADIENT_CASES[case]
    weights = torch.randn(2, shape[0], 4, 8)
    gradients = []
    for attention in (lambda *x, **o: dense(backend, *x, **o), lambda *x, **o: oracle(*x, **o)[0]):
        leaves = [x.requires_grad_() for x in operands(*shape)]
        out = attention(*leaves, **{"mask": None, "causal": True, "scale": SCALE, **extra})
        gradients.append(torch.autograd.grad((out * weights).sum(), leaves))
    for actual, expected in zip(*gradients, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("num_queries", [3, 20])
def test_gradient_of_sinks_and_bias(backend: AttentionBackend, num_queries: int) -> None:
    q, k, v = operands(num_queries, 20)
    weights = torch.randn(2, num_queries, 4, 8)
    gradients = []
    for attention in (lambda *x, **o: dense(backend, *x, **o), lambda *x, **o: oracle(*x, **o)[0]):
        sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0], requires_grad=True)
        bias = torch.randn(4, num_queries, 20, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = attention(q, k, v, mask=bias, causal=True, scale=SCALE, sinks=sinks)
        gradients.append(torch.autograd.grad((out * weights).sum(), (sinks, bias)))
    for actual, expected in zip(*gradients, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("num_queries", [1, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_dropout_is_unbiased(backend: AttentionBackend, num_queries: int, softcap: float | None) -> None:
    q, k, v = operands(num_queries, 20, batch=1)
    exact = dense(backend, q, k, v, scale=SCALE, softcap=softcap)
    runs = [dense(backend, q, k, v, scale=SCALE, softcap=softcap, dropout=0.3) for _ in range(400)]
    assert not torch.equal(runs[0], runs[1])
    error = torch.stack(runs).mean(0) - exact
    assert error.abs().mean() < 0.03


def test_scores_of_low_precision_are_not_rounded(backend: AttentionBackend) -> None:
    """Scores near 30, a common part of all keys, would be off by 0.06 each in bfloat16."""
    q, k, v = operands(1, 256, batch=1, dims=(64, 64))
    q, k = q.sign(), q.sign()[:, ::2] + 0.1 * k
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    out = dense(backend, q, k, v, scale=0.5)
    expected, _ = oracle(q, k, v, scale=0.5)
    assert (out - expected).norm() < 5e-3 * expected.norm()
