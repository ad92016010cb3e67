"""What a teacher says at N positions: all logits, or its best tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DenseRows:
    """logits: [N, V], any float dtype."""

    logits: Tensor

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]


@dataclass(frozen=True)
class TopRows:
    """ids: int64 [N, k]; log_probs: float [N, k], of those ids among all, softened by T. What
    is missing to 1 is one bucket. vocab_size: of the teacher."""

    ids: Tensor
    log_probs: Tensor
    vocab_size: int

    def __len__(self) -> int:
        return len(self.ids)


Rows = DenseRows | TopRows
