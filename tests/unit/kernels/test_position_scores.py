"""Scores of positions: the kernel against einsum, over odd shapes, dtypes, threads and instruction sets."""

from __future__ import annotations

import pytest
import torch

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.attention import attend, position_scores
from hf_accel.kernels.layouts import KV, AttentionOptions, Ragged

LENGTHS = [1, 3, 0, 17, 70, 33]
HEADS = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [5, 16, 64])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("isa")
def test_scores_of_all_pairs(dtype: torch.dtype, dim: int, threads: int) -> None:
    torch.manual_seed(0)
    total, most = sum(LENGTHS), max(LENGTHS)
    q, k = torch.randn(total, 2, HEADS, dim, dtype=dtype).unbind(1)  # rows of other columns between them
    keys, queries = torch.randn(2, 9, HEADS * dim, dtype=dtype)
    rows = torch.randint(9, (2 * most - 1,), dtype=torch.int32)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    torch.set_num_threads(threads)
    out = position_scores(q, k, (keys, queries, rows), starts, scale=0.25)
    torch.set_num_threads(1)
    assert out.shape == (len(LENGTHS), HEADS, most, most) and out.dtype is torch.float32
    a, b = (table.view(9, HEADS, dim).double() for table in (keys, queries))
    for found, length, first in zip(out, LENGTHS, starts.tolist(), strict=False):
        one, other = (x[first : first + length].double() for x in (q, k))
        places = torch.arange(length)
        chosen = rows[most - 1 + places[:, None] - places].long()
        expected = torch.einsum("ihd,ijhd->hij", one, a[chosen]) + torch.einsum("jhd,ijhd->hij", other, b[chosen])
        torch.testing.assert_close(found[:, :length, :length].double(), expected * 0.25, rtol=1e-5, atol=2e-5)


@pytest.mark.usefixtures("isa")
def test_attention_adds_to_each_sequence_its_own() -> None:
    torch.manual_seed(0)
    lengths = [5, 1, 40]
    ragged = Ragged(torch.tensor([0, 5, 6, 46]).int(), torch.tensor(lengths).int(), 40, 40)
    q, k, v = torch.randn(3, 46, HEADS, 8)
    bias, options = torch.randn(3, HEADS, 40, 40), AttentionOptions(0.3, causal=False)
    for sequence, length in enumerate(lengths):
        bias[sequence, :, length:], bias[sequence, :, :, length:] = torch.nan, torch.nan  # which is not read
    together, first = attend(q, KV(k, v), options, ragged, bias=bias), 0
    for sequence, length in enumerate(lengths):
        part = slice(first, first + length)
        alone = Ragged(torch.tensor([0, length]).int(), torch.tensor([length]).int(), length, length)
        own = bias[sequence, :, :length, :length].contiguous()
        assert torch.equal(together[part], attend(q[part], KV(k[part], v[part]), options, alone, bias=own))
        first += length


def test_biases_of_other_numbers_of_sequences_are_refused() -> None:
    q, ragged = torch.randn(4, HEADS, 8), Ragged(torch.tensor([0, 4]).int(), torch.tensor([4]).int(), 4, 4)
    with pytest.raises(UnsupportedError, match=r"\[sequences, heads, tokens, tokens\]"):
        attend(q, KV(q, q), AttentionOptions(1.0, causal=False), ragged, bias=torch.zeros(2, HEADS, 4, 4))
