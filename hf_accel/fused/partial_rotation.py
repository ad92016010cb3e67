"""Rotations of the first numbers of each head, which leave the rest as it is (as GPT-NeoX does, Black and others 2022,
arXiv 2204.06745).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..recognition.trial import RandomNumbers, agree
from .modules import Rotation


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
