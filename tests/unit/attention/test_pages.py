from __future__ import annotations

import pytest
import torch

from hf_accel.attention.pages import PagedSequence, Pages, paged_sequences


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
    cu_q, lengths = torch.tensor([0, q_len]), torch.tensor([kv_len])
    found = list(paged_sequences(cu_q, lengths, block_size=4, window=window))
    assert found == ([] if expected is None else [expected])


def test_sequences_keep_their_rows() -> None:
    cu_q, lengths = torch.tensor([0, 2, 2, 3]), torch.tensor([5, 7, 1])
    first, second = paged_sequences(cu_q, lengths, block_size=4, window=None)
    assert (first.row, first.queries, first.blocks) == (0, slice(0, 2), slice(0, 2))
    assert (second.row, second.queries, second.blocks) == (2, slice(2, 3), slice(0, 1))


def test_gather_orders_heads_then_tokens() -> None:
    keys = torch.arange(5 * 2 * 3 * 4.0).view(5, 2, 3, 4)  # [num_blocks, Hkv, block_size, D]
    pages = Pages(keys, keys[..., :1].contiguous(), None, None)
    k, v = pages.gather(torch.tensor([[4, 1], [0, 4]], dtype=torch.int32), dtype=torch.float32)
    assert k.shape == (2, 2, 6, 4) and v.shape == (2, 2, 6, 1)
    for head in range(2):
        assert torch.equal(k[0, head], torch.cat([keys[4, head], keys[1, head]]))
        assert torch.equal(v[1, head], torch.cat([keys[0, head], keys[4, head]])[:, :1])


def test_gather_dequantizes_to_the_dtype_asked_for() -> None:
    values = torch.tensor([[[[100, -50]]]], dtype=torch.int8)
    pages = Pages(values, values, torch.tensor([[[0.5]]]), torch.tensor([[[0.25]]]))
    k, v = pages.gather(torch.tensor([[0]]), dtype=torch.bfloat16)
    assert k.dtype == v.dtype == torch.bfloat16
    assert k.tolist() == [[[[50.0, -25.0]]]] and v.tolist() == [[[[25.0, -12.5]]]]


def test_block_bytes() -> None:
    assert (
        Pages(torch.empty(9, 2, 16, 8).half(), torch.empty(9, 2, 16, 4).half(), None, None).block_bytes
        == 2 * 16 * 12 * 2
    )
