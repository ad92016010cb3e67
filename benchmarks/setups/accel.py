"""hf_accel.patch with its defaults, at each width of the weights."""

from __future__ import annotations

from transformers import PreTrainedModel

import hf_accel

from .base import Setup


class Accel(Setup):
    def __init__(self, weights: str | None, *, tolerance: float) -> None:
        self.name = f"hf_accel {weights or 'exact'}"
        self.weights = weights
        self.tolerance = tolerance
        self.exact = weights is None

    def prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        return hf_accel.patch(model, weights=self.weights, keep_original=True)

    def new_cache(self, model: PreTrainedModel) -> hf_accel.PagedCache:
        return hf_accel.PagedCache(model.config)


SETUPS = (Accel(None, tolerance=0.05), Accel("int8", tolerance=0.15), Accel("int4", tolerance=0.9))
