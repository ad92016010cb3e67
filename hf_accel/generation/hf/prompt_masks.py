"""Reads the masks that a model makes for its decoder: which tokens of a prompt see later ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...attention.hf.mask import as_known, numbers_of
from ...cache.hf.kinds import layer_names, model_kinds
from ...errors import NotRaggedError

UNKNOWN = "its decoder is given a mask of another form"


def tokens_seen(config: Any, mask: Any, tokens: Tensor) -> list[list[int] | None]:
    """Return for each row how many of the row's first tokens each token sees; None where all see those up to them.

    config: the decoder's. mask: what the decoder is given: None, the columns [B, T] that are no padding, a mask
    [B, 1, T, T], or a dict with a mask for each kind of layer. tokens: [B, T] bool, the columns that hold tokens.
    Raises NotRaggedError for a mask that says anything else, or that lets a token see past its window what it sees of
    later ones.
    """
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        same = bool(tokens.all()) if mask is None else torch.equal(mask.bool().cpu(), tokens)
        if not same:
            raise NotRaggedError(UNKNOWN)
        return [None] * len(tokens)
    kinds = model_kinds(config)
    names = zip(layer_names(config, len(kinds.layers)), kinds.layers, strict=False)
    windows = {name: own[0].window for name, own in names if own}
    masks = mask if isinstance(mask, dict) else dict.fromkeys(windows, mask)
    found: list[list[list[int] | None]] = []
    for name, window in windows.items():
        if name not in masks:
            raise NotRaggedError(UNKNOWN)
        found.append(_seen_by(masks[name], tokens, window))
    if any(each != found[0] for each in found):
        raise NotRaggedError("the masks of its layers let tokens see different ones of the later tokens")
    if any(found[0]) and (kinds.convolves or kinds.recurs):
        raise NotRaggedError("tokens see later ones, and not all of its layers attend")
    return found[0]


def _seen_by(mask: Any, tokens: Tensor, window: int | None) -> list[list[int] | None]:
    known = as_known(mask)
    columns = tokens.shape[1]
    if mask is None:  # stock's sdpa makes none where attention is causal and no window or padding hides a token
        if not bool(tokens.all()) or (window is not None and window < columns):
            raise NotRaggedError(UNKNOWN)
        return [None] * len(tokens)
    if known is not None and known.meaning.window == window and known.lengths == (columns, columns):
        seen = known.columns.cpu().expand(tokens.shape)
        if torch.equal(seen, tokens):
            return [None] * len(tokens)
    numbers = numbers_of(mask)
    if not isinstance(numbers, Tensor) or numbers.shape != (len(tokens), 1, columns, columns):
        raise NotRaggedError(UNKNOWN)
    visible = numbers.cpu() if numbers.dtype is torch.bool else numbers.cpu() == 0
    return [_seen_in_row(visible[row, 0][own][:, own], window) for row, own in enumerate(tokens)]


def _seen_in_row(visible: Tensor, window: int | None) -> list[int] | None:
    """visible: [n, n] bool, which tokens each token sees."""
    indices = torch.arange(len(visible))
    ends = (visible * (indices + 1)).amax(dim=1)
    expected = indices < ends[:, None]
    if window is not None:
        expected = expected & (indices > indices[:, None] - window)
    forward = ends > indices + 1
    if not torch.equal(expected, visible) or bool((ends <= indices).any()):
        raise NotRaggedError(UNKNOWN)
    if not bool(forward.any()):
        return None
    if window is not None and int(ends[forward].max()) > window:
        raise NotRaggedError("tokens see later ones behind its sliding window")
    return [int(end) for end in ends]
