"""The mask of causal attention, as our attention and everybody else see it; the oracle is transformers' own mask."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from hf_accel.attention.hf.mask import CausalMask, as_known, mask_forward, window_of

ROWS, QUERIES, KEYS, WINDOW = 2, 4, 6, 3
COLUMNS = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()


def made(columns: Tensor | None = COLUMNS, *, window: int | None = WINDOW, queries: int = QUERIES) -> Any:
    return mask_forward(**arguments(columns, window=window, queries=queries))


def arguments(columns: Tensor | None, *, window: int | None, queries: int) -> dict[str, Any]:
    keys = KEYS if columns is None else columns.shape[1]
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    return {
        "batch_size": ROWS if columns is None else len(columns), "q_length": queries, "kv_length": keys,
        "q_offset": keys - queries, "mask_function": function, "attention_mask": columns, "local_size": window,
    }  # fmt: skip


def stock(columns: Tensor | None = COLUMNS, *, window: int | None = WINDOW, queries: int = QUERIES) -> Tensor:
    asked = arguments(columns, window=window, queries=queries)
    mask: Tensor = sdpa_mask(**asked, allow_is_causal_skip=False)
    return mask


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 7), (7, 7), (3, 7)])
@pytest.mark.parametrize("padded", [True, False])
def test_its_numbers_are_stock_s(padded: bool, queries: int, keys: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(keys)
    columns = torch.rand(3, keys, generator=generator) < (0.6 if padded else 2)
    mask = made(columns, window=window, queries=queries)
    assert type(mask) is CausalMask
    assert mask.shape == (3, 1, queries, keys)
    assert window_of(mask) == (True, window)
    assert torch.equal(mask & True, stock(columns, window=window, queries=queries))


@pytest.mark.parametrize("count", range(1, KEYS + 3))
def test_a_cut_to_as_many_columns_as_there_are_keys(count: int) -> None:
    """Pix2Struct cuts its mask; where that leaves a column out, the mask is what its numbers say."""
    mask = made()
    cut = mask[:, :, :, :count]
    assert torch.equal(cut & True, stock()[..., :count])
    assert (cut is mask) == (count >= KEYS)
    assert torch.equal(made()[:, :, :, 1:] & True, stock()[..., 1:])
    assert torch.equal(made()[:, :, :, :count:2] & True, stock()[..., :count:2])


@pytest.mark.parametrize("window", [None, 2, 20])
@pytest.mark.parametrize("first", [0, 2, torch.tensor(2)])
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("length", [None, 3, 6, 12])
def test_columns_that_no_query_sees(length: int | None, offset: int, first: Any, window: int | None) -> None:
    """A static cache hands on all the columns that it has; an attention mask may have fewer or more of them."""
    columns = None if length is None else torch.arange(2 * length).view(2, length) % 5 > 0
    asked = arguments(None, window=window, queries=4) | {
        "attention_mask": columns, "kv_length": 9, "q_offset": first + offset, "kv_offset": offset,
    }  # fmt: skip
    mask, expected = mask_forward(**asked), sdpa_mask(**asked, allow_is_causal_skip=False)
    assert type(mask) is CausalMask
    assert (mask.seen, mask.lengths) == (int(first) + 4, (4, 9))
    assert mask.meaning.left_out == (sdpa_mask(**asked) is None)
    assert torch.equal(mask & True, expected)


COPIES: dict[str, Callable[[Tensor], Any]] = {
    "clone": lambda mask: mask.clone(),
    "contiguous clone": lambda mask: mask.clone(memory_format=torch.contiguous_format),
    "detach": lambda mask: mask.detach(),
    "to": lambda mask: mask.to("cpu", non_blocking=True),
    "to its dtype": lambda mask: mask.to(torch.bool, copy=True),
    "contiguous": lambda mask: mask.contiguous(),
    "to a device": lambda mask: mask.to("meta"),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_means_the_same(name: str) -> None:
    mask = made()
    twin = COPIES[name](mask)
    assert (twin.shape, twin.is_known, twin.meaning) == (mask.shape, mask.is_known, mask.meaning)
    assert mask.is_known
    if not twin.is_meta:
        assert torch.equal(twin & True, stock())


READERS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda mask: mask[:, :, :, :3],
    "cat": lambda mask: torch.cat([mask, mask]),
    "where": lambda mask: torch.where(mask, 0.0, -1.0),
    "numpy": lambda mask: torch.from_numpy(mask.numpy()),
    "list": lambda mask: torch.tensor(mask.tolist()),
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "deepcopy": lambda mask: copy.deepcopy(mask),
    "data": lambda mask: mask.data,
    "float": lambda mask: mask.to(torch.float32),
    "expand": lambda mask: mask.expand(ROWS, 5, QUERIES, KEYS),
    "view": lambda mask: mask.view_as(mask),
    "dlpack": lambda mask: torch.from_dlpack(mask.to(torch.uint8)),
    "sum": lambda mask: mask.sum(),
}


@pytest.mark.parametrize("name", READERS)
def test_who_reads_it_reads_stock_s(name: str) -> None:
    got, expected = READERS[name](made()), READERS[name](stock())
    assert type(got) is Tensor
    assert torch.equal(got, expected)


WRITERS: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda mask: mask.masked_fill_(torch.eye(KEYS).bool()[-QUERIES:], False),
    "an item": lambda mask: mask.__setitem__((0, 0, 3, 3), False),
    "numpy": lambda mask: mask.numpy().__setitem__((0, 0, 3, 3), False),
    "what was detached": lambda mask: mask.detach().fill_(True),
    "its data": lambda mask: mask.data.fill_(True),
    "out": lambda mask: torch.logical_not(mask.clone(), out=mask),
}


@pytest.mark.parametrize("name", WRITERS)
def test_who_writes_it_changes_what_it_means(name: str) -> None:
    mask, plain = made(), stock().clone()
    WRITERS[name](mask)
    WRITERS[name](plain)
    assert not torch.equal(plain, stock())
    assert window_of(mask) == (False, None)
    assert torch.equal(mask.whole(), plain)
    assert torch.equal(mask.clone(), plain)


def test_what_a_caller_does_to_its_own_mask_later_changes_nothing() -> None:
    columns = COLUMNS.clone()
    mask = made(columns)
    columns.fill_(True)
    assert torch.equal(mask & True, stock())


@pytest.mark.parametrize("reentrant", [True, False])
def test_attention_by_torch_and_its_gradient(reentrant: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(ROWS, 2, QUERIES, 8, generator=generator, requires_grad=True)
    key = torch.randn(ROWS, 2, KEYS, 8, generator=generator)

    def gradient(mask: Tensor) -> Tensor:
        out = checkpoint(scaled_dot_product_attention, query, key, key, mask, use_reentrant=reentrant)
        (found,) = torch.autograd.grad(out.square().sum(), query) if not reentrant else _backward(out, query)
        return found

    assert torch.equal(gradient(made()), gradient(stock()))


def _backward(out: Tensor, query: Tensor) -> tuple[Tensor]:
    """The gradient by backward(), which reentrant checkpointing needs."""
    query.grad = None
    out.square().sum().backward()
    assert query.grad is not None
    return (query.grad.clone(),)


def all_to_all(*_: Any) -> Tensor:
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


def test_a_mask_that_a_model_changes_is_known_no_longer() -> None:
    asked = arguments(COLUMNS, window=WINDOW, queries=QUERIES) | {"allow_is_causal_skip": False}
    mask = mask_forward(**asked)
    assert as_known(mask) is not None
    mask[..., -1] = True
    expected = sdpa_mask(**asked)
    expected[..., -1] = True
    assert as_known(mask) is None and torch.equal(mask | False, expected)


@pytest.mark.parametrize("changed", [{"q_offset": 9}, {"mask_function": all_to_all}])
def test_another_kind_of_mask_is_stock_s(changed: dict[str, Any]) -> None:
    """Queries behind the last column, another function."""
    asked = arguments(COLUMNS, window=WINDOW, queries=QUERIES) | changed
    mask = mask_forward(**asked)
    assert type(mask) is Tensor
    assert torch.equal(mask, sdpa_mask(**asked | {"allow_is_causal_skip": False}))
