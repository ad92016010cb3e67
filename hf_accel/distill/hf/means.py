"""Means of the two parts of the loss between two lines of a training's log."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossMeans:
    """Collects (ce, kd) of micro-batches on their device; `take` gives what was collected since the last one."""

    def __init__(self) -> None:
        self._micro: list[Tensor] = []
        self._steps: list[Tensor] = []
        self._divided = False

    @property
    def last(self) -> tuple[Tensor, Tensor] | None:
        """(ce, kd) of the newest micro-batch of the step under way: scalars, float32, detached."""
        return (self._micro[-1][0], self._micro[-1][1]) if self._micro else None

    def add(self, ce: Tensor, kd: Tensor, divided: bool) -> None:
        """divided: by the labels of the whole step, so that a step is the sum of its micro-batches, not their mean."""
        self._micro.append(torch.stack((ce.detach().float(), kd.detach().float())))
        self._divided = divided

    def end_step(self) -> None:
        if self._micro:
            parts = torch.stack(self._micro)
            self._steps.append(parts.sum(0) if self._divided else parts.mean(0))
            self._micro = []

    def clear(self) -> None:
        self._micro, self._steps = [], []

    def take(self, args: Any) -> dict[str, float]:
        """Means over the steps and over all processes (each of which must call this); empty if there was no step.
        args: the Trainer's, which say whether the labels were counted over all processes."""
        if not self._steps:
            return {}
        mean = torch.stack(self._steps).mean(0)
        self._steps = []
        if args.world_size > 1 and torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
            if not (self._divided and args.average_tokens_across_devices):
                mean /= args.world_size
        return dict(zip(("ce_loss", "kd_loss"), mean.tolist(), strict=True))
