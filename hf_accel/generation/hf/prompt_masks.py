"""Reads the masks that a model makes for its decoder: which tokens of a prompt see later ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...attention.hf.mask import as_understood, numbers_of
from ...cache.hf.kinds import layer_names, model_kinds
from ...cache.kinds import Kind
from ...errors import NotRaggedError

UNKNOWN = "its decoder is given a mask of another form"


@dataclass(frozen=True)
class Seen:
    """The tokens of prompts that see later ones.

    rows: for each row, how many of its first tokens each token sees; None where all see those up to themselves.
    in_windows: whether only layers with a sliding window let tokens see later ones.
    """

    rows: list[list[int] | None]
    in_windows: bool = False


def tokens_seen(config: Any, mask: Any, tokens: Tensor, *, causal: bool = True, whole: bool = False) -> Seen:
    """Read from the masks of a prompt which tokens see later ones.

    config: the decoder's. causal: whether its attention is, where stock's sdpa makes no mask. mask: what the decoder
    is given: None, the columns [B, T] that are no padding, a mask [B, 1, T, T], or a dict with a mask for each kind of
    layer. tokens: [B, T] bool, the columns that hold tokens. whole: whether the masks that the decoder makes by itself
    let each token see all others. Raises NotRaggedError for a mask that says anything else,
    or that lets a token see past its window what it sees of later ones.
    """
    kinds = model_kinds(config)
    names = zip(layer_names(config, len(kinds.layers)), kinds.layers, strict=False)
    named = {name: own[0] for name, own in names if own}
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        same = bool(tokens.all()) if mask is None else torch.equal(mask.bool().cpu(), tokens)
        if not same:
            raise NotRaggedError(UNKNOWN)
        if whole:
            return Seen([[count] * count if count > 1 else None for count in tokens.sum(1).tolist()])
        if causal or not bool(tokens.all()):  # the decoder makes a mask for padding
            return Seen([None] * len(tokens))
        mask = dict.fromkeys(named)
    masks = mask if isinstance(mask, dict) else dict.fromkeys(named, mask)
    found: list[tuple[bool, list[list[int] | None]]] = []
    for name, kind in named.items():
        if name not in masks:
            raise NotRaggedError(UNKNOWN)
        found.append((kind.window is not None, _seen_by(masks[name], tokens, kind, causal=causal)))
    seen = _in_all_layers(found)
    if any(seen.rows) and not all(kind.sees_later for kind in kinds.distinct):
        raise NotRaggedError("tokens see later ones, and not all of its layers attend, or some within chunks")
    return seen


def _in_all_layers(found: list[tuple[bool, list[list[int] | None]]]) -> Seen:
    """Put together what tokens see in each kind of layer. found: whether it has a window, and see Seen.rows."""
    first = found[0][1]
    if all(rows == first for _, rows in found):
        return Seen(first)
    inside, outside = ([rows for windowed, rows in found if windowed is wanted] for wanted in (True, False))
    if not any(map(any, outside)) and all(rows == inside[0] for rows in inside):
        return Seen(inside[0], in_windows=True)
    raise NotRaggedError("the masks of its layers let tokens see different ones of the later tokens")


def _seen_by(mask: Any, tokens: Tensor, kind: Kind, *, causal: bool) -> list[list[int] | None]:
    known, columns, window = as_understood(mask), tokens.shape[1], kind.window
    if mask is None or (known is not None and known.meaning.left_out and not causal):
        # Stock's sdpa makes no mask where the attention says it all, and no window or padding hides a token.
        if not bool(tokens.all()) or (window is not None and window < columns):
            raise NotRaggedError(UNKNOWN)
        return [None if causal or columns == 1 else [columns] * columns for _ in tokens]
    meant = None if known is None else (known.meaning.window, known.meaning.chunk)
    if known is not None and meant == (kind.mask_window, kind.chunk) and known.lengths == (columns, columns):
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
