"""The bias of positions that T5's attention adds to its scores, as a table by distance for attention over pages.

A module that has a bias makes it with compute_bias(), from the distance of a key alone. Modules behind it are given
the same tensor, and attention to an encoder's output is given zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...cache.hf import PagedKV
from ...errors import NotRaggedError
from ...kernels.layouts import PositionBias

STEP = 128  # tables are longer than they must be by less than this, so that few passes make one


def bias_over_pages(module: nn.Module, numbers: Tensor, paged: PagedKV) -> PositionBias | None:
    """Return what the bias [1, H, Q, T] of a ragged pass means to each token; None if it adds nothing.

    Its own numbers are those of a row that is one sequence, and are not read. Raises NotRaggedError for a bias that is
    not known.
    """
    cache: Any = paged.layer.cache
    given, known = cache.given_bias or (None, None)
    if given is numbers:
        return known
    if paged.layer.columns() is not None:
        raise NotRaggedError(f"{type(module).__name__} adds a bias of positions to columns")
    if getattr(module, "has_relative_attention_bias", False) and not paged.layer.attends_to_all:
        known = table_of(module, paged.group_step.ragged.max_kv, cache.bias_tables)
    elif bool(numbers.any()):
        raise NotRaggedError(f"{type(module).__name__} is given a bias that is not known")
    else:
        known = None
    cache.given_bias = numbers, known
    return known


def table_of(module: Any, longest: int, made: dict[nn.Module, tuple[tuple[int, int], PositionBias]]) -> PositionBias:
    """Return the table for sequences of up to `longest` tokens. made: the tables of this and other modules."""
    weight = module.relative_attention_bias.weight
    state, bias = made.get(module, (None, None))
    if state != (weight.data_ptr(), weight._version) or bias is None or bias.table.shape[1] < longest:
        length = -(-longest // STEP) * STEP
        with torch.no_grad():
            last = module.compute_bias(1, length, device=weight.device, past_seen_tokens=length - 1)
        bias = PositionBias(last[0, :, 0].float().contiguous(), by_distance=True)
        made[module] = (weight.data_ptr(), weight._version), bias
    return bias
