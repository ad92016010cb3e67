"""What the engine asks of a model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..cache.group import Step


class Runner(Protocol):
    """A model on pages."""

    @property
    def device(self) -> torch.device: ...

    def __call__(self, ids: list[int], positions: list[int], step: Step, keep: list[int]) -> Tensor:
        """Compute N tokens, end to end; logits [len(keep), V] of those numbered in `keep`."""
