"""Attention to selected tokens: is it known what code does with them?"""

from __future__ import annotations

import re
from typing import Any

from .source import lines_of

SELECTED = "indices"  # the keyword of the tokens that are attended to
MASKS_OTHERS = re.compile(  # what transformers' code does with them where no function takes them
    r"index_mask = topk_indices\.new_ones\(\(batch_size, seq_length, key_states\.shape\[-?2\]\), dtype=torch\.bool\)"
    r"\.scatter\(-1, topk_indices\.long\(\), False\)\.unsqueeze\(1\)"
)


def selects_tokens(forward: Any) -> bool:
    """Return whether a module's attention function may be given the tokens that it attends to, and how is known."""
    lines = lines_of(forward)
    return any(map(MASKS_OTHERS.fullmatch, lines)) and "attention_mask = attention_mask & ~index_mask" in lines
