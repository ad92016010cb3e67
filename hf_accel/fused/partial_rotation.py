"""Rotations that leave something as it is: all but the first numbers of each head (as GPT-NeoX does, Black and others
2022, arXiv 2204.06745), or the tokens ahead of those of an image's patches (as DINOv3 does).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..recognition.rotations import Rotation
from ..recognition.trial import RandomNumbers, agree
from .modules import RotaryForm, form_of_rotation


@lru_cache(maxsize=256)
def leaves_rest(original: Rotation) -> bool:
    """Return whether a function rotates as many numbers of each head as its tables have, and leaves the rest.

    The numbers that it rotates must have the bits that they have in heads of this size.
    """
    numbers, size = RandomNumbers(), 16
    q, k = (numbers(2, heads, 5, size + 8) for heads in (6, 2))
    tables = numbers(2, 5, size), numbers(2, 5, size)

    def whole() -> tuple[torch.Tensor, ...]:
        return original(q, k, *tables)

    def parts() -> tuple[torch.Tensor, ...]:
        rotated = original(q[..., :size], k[..., :size], *tables)
        return tuple(torch.cat((new, x[..., size:]), dim=-1) for new, x in zip(rotated, (q, k), strict=True))

    return agree(whole, parts)


@lru_cache(maxsize=256)
def of_last_tokens(original: Rotation) -> Rotation | None:
    """Return how a function rotates by tables [B, T, dim], if it takes tables [P, dim] of the last P tokens of all
    sequences and leaves those ahead of them as they are; None for any other.
    """

    def rotation(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        each = [original(q[i : i + 1], k[i : i + 1], cos[i], sin[i]) for i in range(len(q))]
        return torch.cat([one for one, _ in each]), torch.cat([other for _, other in each])

    numbers, size = RandomNumbers(), 16
    q, k = (numbers(2, heads, 7, size) for heads in (6, 2))
    cos, sin = (numbers(5, size) for _ in range(2))

    def parts() -> tuple[torch.Tensor, ...]:
        tables = (table.expand(2, -1, -1) for table in (cos, sin))
        rotated = rotation(q[..., 2:, :], k[..., 2:, :], *tables)
        return tuple(torch.cat((x[..., :2, :], new), dim=-2) for new, x in zip(rotated, (q, k), strict=True))

    return rotation if agree(lambda: original(q, k, cos, sin), parts) else None


def rotation_over_rows(
    original: Rotation, dtype: torch.dtype, table_dtype: torch.dtype
) -> tuple[RotaryForm, bool] | None:
    """Return the form in which a function rotates the tokens of a call over rows, and whether its tables are
    those of the last tokens; None if it has no form that is known.
    """
    form, of_last = form_of_rotation(original, dtype, table_dtype), False
    if form is None and (last := of_last_tokens(original)) is not None:
        form, of_last = form_of_rotation(last, dtype, table_dtype), True
    return None if form is None else (form, of_last)
