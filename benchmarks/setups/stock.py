"""transformers as it is: bfloat16, sdpa attention, a growing KV cache."""

from __future__ import annotations

from transformers import PreTrainedModel

from .base import Setup


class Stock(Setup):
    name = "stock"
    tolerance = 0.0
    exact = True

    def prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        return model


SETUPS = (Stock(),)
