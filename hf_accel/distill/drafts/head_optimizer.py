"""The optimizer of a draft head that begins with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Muon

from ...generation.hf.head_module import HeadModule

OTHERS_SHARE = 0.2  # what AdamW's learning rate is of Muon's


class HeadOptimizer(torch.optim.Optimizer):
    """Takes the steps of torch.optim.Muon for the matrices of a head, and of AdamW for its norms, biases and words.

    Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon) makes the singular values of a matrix's momentum
    equal, which trains matrices that begin as random numbers with fewer tokens than AdamW; it is not for the last
    products over a vocabulary. Rates are as in 2502.16982: an update of a matrix is as large as AdamW's is there.
    """

    def __init__(self, head: HeadModule, learning_rate: float) -> None:
        """learning_rate: of the matrices, which a scheduler may change as that of any optimizer."""
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        words = set() if head.words is None else set(head.words.parameters())
        matrices = [parameter for parameter in trained if parameter.ndim == 2 and parameter not in words]
        found = set(matrices)
        others = [parameter for parameter in trained if parameter not in found]
        groups = [{"params": matrices, "lr": learning_rate}, {"params": others, "lr": OTHERS_SHARE * learning_rate}]
        super().__init__(groups, {"lr": learning_rate})
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            Muon([self.param_groups[0]], weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            AdamW([self.param_groups[1]], betas=(0.9, 0.95), weight_decay=0.0),
        )
        self._share_groups()

    def _share_groups(self) -> None:
        """Let a rate that is set here be the parts' own."""
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()
