"""The interface through which the batcher calls a model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..cache.group import Step


class Runner(Protocol):
    """A model that reads and writes pages."""

    @property
    def device(self) -> torch.device: ...

    def __call__(self, ids: list[int] | Tensor, positions: list[int], step: Step, keep: list[int]) -> Tensor:
        """Compute N tokens of one or many sequences, which stand end to end.

        ids: N, or a tensor [N] int64 on the model's device: one token of each sequence, which the host has not read.
        positions: N. step: the slots that the pass writes and reads; its tensors are on the host. keep: the
        indices of the tokens whose logits are wanted. Returns logits [len(keep), V], on the model's device.
        """
