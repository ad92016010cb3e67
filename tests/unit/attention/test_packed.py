from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.attention import AttentionBackend
from hf_accel.kernels.layouts import KV, AttentionOptions, Ragged

from ...devices import device_of
from .backends import each_backend
from .oracle import assert_close, oracle
from .paging import on

SCALE = 0.3

pytestmark = each_backend


def operands(lengths: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    num_queries, num_keys = (sum(column) for column in zip(*lengths, strict=True))
    return torch.randn(num_queries, 4, 8), torch.randn(num_keys, 2, 8), torch.randn(num_keys, 2, 6)


def packed(backend: AttentionBackend, x: tuple[Tensor, ...], lengths: list[tuple[int, int]], **options: Any) -> Tensor:
    q_len, k_len = zip(*lengths, strict=True)
    cu_q, kv_len = torch.tensor([0, *q_len]).cumsum(0).int(), torch.tensor(k_len, dtype=torch.int32)
    q, *kv = x
    device = device_of(backend)
    ragged = Ragged(cu_q.to(device), kv_len.to(device), max(q_len), max(k_len))
    given = AttentionOptions(SCALE, **{name: on(value, device) for name, value in options.items()})
    return backend.packed(q.to(device), KV(*(part.to(device) for part in kv)), ragged, given).cpu()


def expected(x: tuple[Tensor, ...], lengths: list[tuple[int, int]], **options: Any) -> Tensor:
    q_len, k_len = (list(column) for column in zip(*lengths, strict=True))
    parts = [column.split(n) for column, n in zip(x, (q_len, k_len, k_len), strict=True)]
    sequences = [[part.transpose(0, 1)[None] for part in sequence] for sequence in zip(*parts, strict=True)]
    return torch.cat([oracle(*sequence, scale=SCALE, **options)[0][0] for sequence in sequences])


LENGTHS = {
    "one": [(5, 5)],
    "training": [(7, 7), (1, 1), (33, 33), (20, 20)],
    "with a past": [(1, 30), (5, 9), (20, 33)],
    "empty ones": [(0, 0), (3, 3), (0, 4), (2, 0), (1, 1)],
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "extra",
    [{}, {"window": 4}, {"softcap": 2.0}, {"sinks": torch.tensor([-2.0, 0.0, 1.0, 3.0])}],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_equals_oracle(backend: AttentionBackend, lengths: str, causal: bool, extra: dict[str, Any]) -> None:
    x = operands(LENGTHS[lengths])
    out = packed(backend, x, LENGTHS[lengths], causal=causal, **extra)
    assert_close(out, expected(x, LENGTHS[lengths], causal=causal, **extra))


def test_gradients_equal_oracle(backend: AttentionBackend) -> None:
    lengths = LENGTHS["training"]
    weights = torch.randn(sum(n for n, _ in lengths), 4, 6)
    gradients = []
    for attention in (lambda *x: packed(backend, x, lengths, causal=True), lambda *x: expected(x, lengths)):
        leaves = [x.requires_grad_() for x in operands(lengths)]
        gradients.append(torch.autograd.grad((attention(*leaves) * weights).sum(), leaves))
    for actual, wanted in zip(*gradients, strict=True):
        assert_close(actual, wanted)


def test_dropout_reaches_every_sequence(backend: AttentionBackend) -> None:
    lengths = [(6, 6), (6, 6)]
    x = operands(lengths)
    exact = packed(backend, x, lengths, causal=False)
    dropped = packed(backend, x, lengths, causal=False, dropout=0.9)
    assert all(not torch.equal(a, b) for a, b in zip(exact.split(6), dropped.split(6), strict=True))


def test_no_sequences(backend: AttentionBackend) -> None:
    ragged = Ragged(torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), 0, 0)
    kv = KV(torch.empty(0, 2, 8), torch.empty(0, 2, 6))
    assert backend.packed(torch.empty(0, 4, 8), kv, ragged, AttentionOptions(SCALE)).shape == (0, 4, 6)
