"""Convolutions over rows, and gates of a bias: the kernels against torch, over shapes, dtypes and instruction sets."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accel.kernels.cpu.attention import GatedBias, attend, bias_gates, position_scores
from hf_accel.kernels.cpu.row_conv import row_conv, row_norm
from hf_accel.kernels.layouts import KV, AttentionOptions, Ragged

LENGTHS = [1, 3, 0, 17, 40]
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
NEAR = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize(("channels", "length", "before"), [(70, 5, 2), (16, 4, 3), (3, 1, 0)])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.usefixtures("isa")
def test_rows_of_sequences_are_convolved(
    dtype: torch.dtype, channels: int, length: int, before: int, has_norm: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(LENGTHS), 2 * channels).to(dtype)[:, :channels]
    weight = torch.randn(channels, 1, length).to(dtype)
    bias = torch.randn(channels).to(dtype) if has_norm else None
    read = torch.tensor([1, 2, 0, 11, 40]).int() if has_norm else None
    parts = [torch.randn(channels), torch.rand(channels) + 0.5, torch.randn(channels), torch.randn(channels)]
    parts = [each.to(dtype) for each in parts]
    norm = row_norm(parts, 0.1) if has_norm else None
    activation = "silu" if has_norm else None
    torch.set_num_threads(2)
    found = row_conv(x, weight, bias, (STARTS, read), before=before, behind=(norm, activation))
    torch.set_num_threads(1)
    for sequence, count in enumerate(LENGTHS):
        rows = x[STARTS[sequence] : STARTS[sequence + 1]].double()
        if read is not None:
            rows = rows * (torch.arange(count) < read[sequence])[:, None]
        if not count:
            continue
        padded = F.pad(rows.T, (before, length - 1 - before))[None]
        out = F.conv1d(padded, weight.double(), None if bias is None else bias.double(), groups=channels)
        if has_norm:
            mean, variance, factor, rest = (each.double() for each in parts)
            out = F.silu(F.batch_norm(out, mean, variance, factor, rest, eps=0.1))
        expected, near = out[0].T, NEAR[dtype]
        got = found[STARTS[sequence] : STARTS[sequence + 1]].double()
        torch.testing.assert_close(got, expected, rtol=near, atol=near * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.usefixtures("isa")
def test_gates_of_rows_and_heads(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    heads, dim, rows = 3, 21, 70
    x, weight = torch.randn(rows, heads * dim + 5).to(dtype)[:, : heads * dim], torch.randn(8, dim).to(dtype) * 0.3
    bias = torch.randn(8).to(dtype) if has_bias else None
    factors = torch.randn(1, heads, 1, 1).to(dtype)
    linear = F.linear(x.double().unflatten(1, (heads, dim)), weight.double(), None if bias is None else bias.double())
    a, b = linear.unflatten(-1, (2, 4)).sum(-1).sigmoid().unbind(-1)
    expected = a * (b * factors.double().flatten() - 1) + 2
    torch.testing.assert_close(bias_gates(x, weight, bias, factors).double(), expected, rtol=1e-5, atol=1e-5)


def _reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.einsum("ihd,jhd->hij", q, k).double() * 0.3 + bias.double()
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.double())


@pytest.mark.usefixtures("isa")
def test_attention_multiplies_a_bias_by_gates() -> None:
    torch.manual_seed(0)
    ragged = Ragged(STARTS, torch.tensor(LENGTHS).int(), max(LENGTHS), max(LENGTHS))
    (q, k, v), gates, bias = torch.randn(3, sum(LENGTHS), 3, 8), torch.randn(sum(LENGTHS), 3), torch.randn(3, 40, 40)
    options = AttentionOptions(0.3, causal=False)
    found = attend(q, KV(k, v), options, ragged, bias=GatedBias(bias, gates))
    ones = attend(q, KV(k, v), options, ragged, bias=GatedBias(bias, torch.ones_like(gates)))
    assert torch.equal(ones, attend(q, KV(k, v), options, ragged, bias=bias))
    for first, end in pairwise(STARTS.tolist()):
        part = slice(first, end)
        gated = gates[part].T[..., None] * bias[:, : end - first, : end - first]
        torch.testing.assert_close(
            found[part].double(), _reference(q[part], k[part], v[part], gated), rtol=1e-4, atol=1e-5
        )


@pytest.mark.usefixtures("isa")
def test_positions_may_have_keys_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, sum(LENGTHS), 3, 20)
    keys, rows = torch.randn(9, 60), torch.randint(9, (79,), dtype=torch.int32)
    found = position_scores(q, k, (keys, None, rows), STARTS, scale=0.5)
    both = position_scores(q, k, (keys, torch.zeros_like(keys), rows), STARTS, scale=0.5)
    for sequence, count in enumerate(LENGTHS):
        torch.testing.assert_close(found[sequence, :, :count, :count], both[sequence, :, :count, :count])
