"""What a batch's losses add up to, and how gradients that forward computed reach backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .objective import Objective


class Sums(NamedTuple):
    """Scalars, float32 (float64 of float64). total = alpha * ce + (1 - alpha) * kd is differentiable; ce, the sum of
    cross entropies, and kd, T^2 times the sum of D, are only to be looked at."""

    total: Tensor
    ce: Tensor
    kd: Tensor


def weigh(ce: Tensor, kd: Tensor, objective: Objective) -> Sums:
    shares = [(objective.alpha, ce), (1 - objective.alpha, kd)]
    total = torch.stack([share * part for share, part in shares if share]).sum()  # not 0 * inf
    return Sums(total, ce, kd)


def mean(total: Tensor, count: int, num_items: Tensor | int | None) -> Tensor:
    """total / num_items, or / count without."""
    if num_items is None:
        return total / max(1, count)
    if isinstance(num_items, int) and num_items < 1:
        raise UnsupportedError(f"num_items={num_items}: the sum is divided by it; 1 or more, or None for the mean")
    return total / num_items


def scaled(saved: Tensor, factor: Tensor) -> Tensor:
    """saved * factor, in place if no later backward can need `saved` again."""
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return saved * factor if kept is None or kept() else saved.mul_(factor)
