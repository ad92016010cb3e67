"""Means of the two parts of the loss between two lines of a training's log."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossMeans:
    """Collects what a hook tells, on its device; `take` gives the means since the last one."""

    def __init__(self) -> None:
        self._steps: list[Tensor] = []
        self._are_divided = False

    def end_step(self, hook: Any) -> None:
        """A step is the sum of its micro-batches if each was divided by the labels of all, else their mean."""
        if hook.ce:
            parts = torch.stack((torch.stack(hook.ce), torch.stack(hook.kd)))
            self._steps.append(parts.sum(1) if hook.is_divided else parts.mean(1))
            self._are_divided = hook.is_divided
        hook.ce.clear()
        hook.kd.clear()

    def clear(self) -> None:
        self._steps = []

    def take(self, args: Any) -> dict[str, float]:
        """Over all processes, each of which must call this; empty if there was no step. args: the Trainer's, which say
        whether the labels were counted over all processes."""
        if not self._steps:
            return {}
        mean = torch.stack(self._steps).mean(0)
        self._steps = []
        if args.world_size > 1 and torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
            if not (self._are_divided and args.average_tokens_across_devices):
                mean /= args.world_size
        return dict(zip(("ce_loss", "kd_loss"), mean.tolist(), strict=True))
