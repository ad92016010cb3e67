"""What masks of a prompt say, read from masks that transformers makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig

from hf_accel.errors import NotRaggedError
from hf_accel.generation.hf.prompt_masks import tokens_seen

LENGTH = 8
ALL = torch.ones(1, LENGTH, dtype=torch.bool)
LLAMA = LlamaConfig(num_hidden_layers=2)


def gemma(window: int) -> Any:
    return Gemma3TextConfig(
        num_hidden_layers=2, sliding_window=window, layer_types=["sliding_attention", "full_attention"]
    )


def causal(window: int = LENGTH) -> Tensor:
    places = torch.arange(LENGTH)
    return ((places <= places[:, None]) & (places > places[:, None] - window))[None, None]


def with_image(mask: Tensor, start: int, stop: int) -> Tensor:
    mask = mask.clone()
    mask[..., start:stop, start:stop] = True
    return mask


@pytest.mark.parametrize("mask", [None, ALL.long(), causal(), torch.where(causal(), 0.0, -torch.inf)], ids=str)
def test_causal_masks(mask: Tensor | None) -> None:
    assert tokens_seen(LLAMA, mask, ALL).rows == [None]


def test_tokens_that_see_later_ones() -> None:
    assert tokens_seen(LLAMA, with_image(causal(), 1, 4), ALL).rows == [[1, 4, 4, 4, 5, 6, 7, 8]]
    masks = {"full_attention": causal(), "sliding_attention": causal(4)}
    assert tokens_seen(gemma(4), masks, ALL).rows == [None]
    image = {name: with_image(mask, 0, 3) for name, mask in masks.items()}
    assert tokens_seen(gemma(4), image, ALL).rows == [[3, 3, 3, 4, 5, 6, 7, 8]]


def test_without_a_mask_attention_that_is_not_causal_sees_all() -> None:
    """So does stock's sdpa; where there is padding, it is given a mask, which is causal."""
    padded = torch.arange(LENGTH)[None] >= 2
    for mask in (None, ALL.long()):
        assert tokens_seen(LLAMA, mask, ALL, causal=False).rows == [[LENGTH] * LENGTH]
    assert tokens_seen(LLAMA, causal(), ALL, causal=False).rows == [None]
    assert tokens_seen(LLAMA, padded.long(), padded, causal=False).rows == [None]
    with pytest.raises(NotRaggedError):
        tokens_seen(gemma(4), None, ALL, causal=False)


def test_padding_is_left_out() -> None:
    tokens = torch.arange(LENGTH)[None] >= 2
    mask = with_image(causal(), 3, 6) & tokens[:, None, None]
    assert tokens_seen(LLAMA, mask, tokens).rows == [[1, 4, 4, 4, 5, 6]]


@pytest.mark.parametrize(
    ("config", "mask"),
    [
        (LLAMA, ~causal()),
        (LLAMA, causal(4)),  # a window that its layers do not have
        (LLAMA, ALL.long() * 0),
        (LLAMA, {}),
        (LLAMA, causal()[..., :-1]),
        (gemma(4), {"full_attention": causal(), "sliding_attention": causal(3)}),
        (gemma(4), {"full_attention": causal(), "sliding_attention": None}),
        (gemma(4), {"full_attention": with_image(causal(), 0, 3), "sliding_attention": causal(4)}),
        (gemma(4), {"full_attention": with_image(causal(), 3, 6), "sliding_attention": with_image(causal(4), 3, 6)}),
    ],
)
def test_other_masks_are_refused(config: Any, mask: Any) -> None:
    with pytest.raises(NotRaggedError, match=r"mask|window"):
        tokens_seen(config, mask, ALL)


def test_a_hole_in_what_a_token_sees_is_refused() -> None:
    mask = causal()
    mask[..., 5, 2] = False
    with pytest.raises(NotRaggedError):
        tokens_seen(LLAMA, mask, ALL)
