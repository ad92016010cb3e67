"""A transformers model as the Batcher's Runner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...cache.group import PageGroup
from ...cache.hf import RaggedCache
from ...cache.step import Step
from .inputs import model_device


class ModelRunner:
    """Calls a patched model on the tokens of many sequences as one row [1, N].

    groups, group_of_layer: the pages, as cache.hf.page_groups makes them.
    """

    def __init__(self, model: PreTrainedModel, groups: list[PageGroup], group_of_layer: list[int]) -> None:
        self.model: Any = model
        self.group_of_layer = group_of_layer
        self.cache = RaggedCache(groups, group_of_layer)
        supports: Any = self.model._supports_logits_to_keep
        self.selects = bool(supports())

    @property
    def device(self) -> torch.device:
        return model_device(self.model)

    def __call__(self, ids: list[int], positions: list[int], step: Step, keep: list[int]) -> Tensor:
        """Logits [len(keep), V] of the tokens numbered in `keep`."""
        self.cache.step, device = step, step.groups[0].slots.device
        rows = torch.tensor(keep or [0], dtype=torch.int64, device=device)
        everything = len(keep) == len(ids)
        selection = {"logits_to_keep": 0 if everything else rows} if self.selects else {}
        output = self.model(
            input_ids=torch.tensor([ids], dtype=torch.int64, device=device),
            position_ids=torch.tensor([positions], dtype=torch.int64, device=device),
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            **selection,
        )
        self.cache.check_read()
        logits: Tensor = output.logits[0]
        if not self.selects and not everything:
            logits = logits[rows]
        return logits[: len(keep)]
