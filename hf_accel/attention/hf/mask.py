"""The mask function: a small mask that says what it means where that is known, stock's own for all else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from ...tensors import is_recorded

_INFO = "_hf_accel_mask"


@dataclass
class MaskInfo:
    """What a 2-D mask [B, T] stands for: causal attention, within `window`, to columns that are not padding.

    left_out: where stock's sdpa makes no mask, and goes by is_causal instead.
    """

    window: int | None
    padded: bool
    left_out: bool
    expanded: Tensor | None = None


def mask_info(mask: Tensor | None) -> MaskInfo | None:
    """What a mask of ours stands for; None for any other."""
    info: MaskInfo | None = getattr(mask, _INFO, None)
    return info


def mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """A 2-D mask that carries a MaskInfo for causal attention, within a window or not; stock's 4-D one for all else.

    It is never None where stock would make a mask: a module whose is_causal is False would lose it.
    """
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    known = aligned and allow_is_causal_skip and _is_causal(mask_function, local_size)
    if not known or is_recorded():
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            config=config,
            **kwargs,
        )
    columns = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length]
    padded = columns is not None and not bool(columns.all())
    if not padded or columns is None:
        columns = torch.ones(1, 1, dtype=torch.bool, device=kwargs.get("device")).expand(batch_size, kv_length)
    mask = columns.view_as(columns)  # a tensor of our own: the note must not stick to the user's mask
    whole = q_length in (1, kv_length) and (local_size is None or kv_length < local_size)
    setattr(mask, _INFO, MaskInfo(local_size, padded, left_out=whole and not padded))
    return mask


_WINDOWED: Any = sliding_window_causal_mask_function(1)


def _is_causal(mask_function: Any, local_size: int | None) -> bool:
    """Whether it is transformers' own function for causal attention, within a window of `local_size` if given."""
    if local_size is None:
        return mask_function is causal_mask_function
    if getattr(mask_function, "__code__", None) is not _WINDOWED.__code__:
        return False
    (window, causal), (own_window, _) = (f.__closure__[0].cell_contents for f in (mask_function, _WINDOWED))
    same = window.__code__ is own_window.__code__ and causal is causal_mask_function
    return bool(same and window.__closure__[0].cell_contents == local_size)


def expanded_mask(mask: Tensor, info: MaskInfo, q_length: int) -> Tensor:
    """The 4-D bool mask [B, 1, Q, T] of a 2-D one, made once a forward pass."""
    if info.expanded is None:
        columns = torch.arange(mask.shape[1], device=mask.device)
        queries = columns[-q_length:, None]
        visible = columns <= queries
        if info.window is not None:
            visible &= columns > queries - info.window
        info.expanded = visible & mask[:, None, None, :]
    return info.expanded
