from __future__ import annotations

import pytest
import torch

from hf_accel.attention.paged_kv import PagedSequence, gather, paged_sequences
from hf_accel.kernels.layouts import KV, Ragged


@pytest.mark.parametrize(
    "q_len, kv_len, window, expected",
    [
        (1, 9, None, PagedSequence(0, 0, 1, 0, 3, 9)),
        (1, 8, None, PagedSequence(0, 0, 1, 0, 2, 8)),
        (9, 9, None, PagedSequence(0, 0, 9, 0, 3, 9)),
        (1, 9, 1, PagedSequence(0, 0, 1, 2, 1, 1)),
        (1, 9, 2, PagedSequence(0, 0, 1, 1, 2, 5)),
        (4, 9, 2, PagedSequence(0, 0, 4, 1, 2, 5)),
        (5, 9, 2, PagedSequence(0, 0, 5, 0, 3, 9)),
        (0, 9, None, None),
        (3, 0, None, None),
    ],
)
def test_blocks_that_a_sequence_needs(
    q_len: int, kv_len: int, window: int | None, expected: PagedSequence | None
) -> None:
    ragged = Ragged(torch.tensor([0, q_len]), torch.tensor([kv_len]), q_len, kv_len)
    found = list(paged_sequences(ragged, block_size=4, window=window))
    assert found == ([] if expected is None else [expected])


def test_sequences_keep_their_numbers() -> None:
    ragged = Ragged(torch.tensor([0, 2, 2, 3]), torch.tensor([5, 7, 1]), 2, 7)
    first, second = paged_sequences(ragged, block_size=4, window=None)
    assert (first.number, first.queries, first.blocks) == (0, slice(0, 2), slice(0, 2))
    assert (second.number, second.queries, second.blocks) == (2, slice(2, 3), slice(0, 1))


def test_gather_orders_heads_then_tokens() -> None:
    keys = torch.arange(5 * 2 * 3 * 4.0).view(5, 2, 3, 4)  # [num_blocks, Hkv, block_size, D]
    pages = KV(keys, keys[..., :1].contiguous())
    k, v, *_ = gather(pages, torch.tensor([[4, 1], [0, 4]], dtype=torch.int32), torch.float32)
    assert k.shape == (2, 2, 6, 4) and v.shape == (2, 2, 6, 1)
    for head in range(2):
        assert torch.equal(k[0, head], torch.cat([keys[4, head], keys[1, head]]))
        assert torch.equal(v[1, head], torch.cat([keys[0, head], keys[4, head]])[:, :1])


def test_gather_dequantizes_to_the_dtype_asked_for() -> None:
    values = torch.tensor([[[[100, -50]]]], dtype=torch.int8)
    pages = KV(values, values, torch.tensor([[[0.5]]]), torch.tensor([[[0.25]]]))
    k, v, *_ = gather(pages, torch.tensor([[0]]), torch.bfloat16)
    assert k.dtype == v.dtype == torch.bfloat16
    assert k.tolist() == [[[[50.0, -25.0]]]] and v.tolist() == [[[[25.0, -12.5]]]]


def test_packed_keys_begin_where_those_before_end() -> None:
    cu_k = Ragged(torch.tensor([0, 2, 3, 3], dtype=torch.int32), torch.tensor([5, 0, 4]), 2, 5).cu_k
    assert cu_k.tolist() == [0, 5, 5, 9] and cu_k.dtype == torch.int32
