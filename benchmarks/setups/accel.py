"""hf_accel.patch with its defaults, at each width of the weights."""

from __future__ import annotations

from transformers import PreTrainedModel

import hf_accel
from hf_accel.config import KVDtype

from .base import Setup


class Accel(Setup):
    attends = True

    def __init__(
        self,
        weights: str | None,
        *,
        tolerance: float,
        kv_dtype: KVDtype = "auto",
        deterministic: bool = False,
        fuse: bool = True,
    ) -> None:
        self.name = f"hf_accel {weights or 'exact'}" + ("" if kv_dtype == "auto" else f" with {kv_dtype} KV")
        self.name += " deterministic" if deterministic else ""
        self.name += "" if fuse else ", not fused"
        self.deterministic, self.fuse = deterministic, fuse
        self.only_named = "it tells what deterministic=True costs on a GPU" if deterministic else None
        if weights == "fp8":
            self.only_named = "it is for GPUs: on a CPU plain torch computes it"
        self.weights = weights
        self.tolerance = tolerance
        self.kv_dtype = kv_dtype
        self.exact = weights is None
        self.multiplies = "float" if weights in (None, "fp8") else "integer"

    def prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        cache = hf_accel.CacheConfig(dtype=self.kv_dtype)
        keywords = {"keep_original": True, "deterministic": self.deterministic, "fuse": self.fuse}
        return hf_accel.patch(model, weights=self.weights, cache=cache, **keywords)

    def new_cache(self, model: PreTrainedModel, *, batch: int, tokens: int) -> hf_accel.PagedCache:
        return hf_accel.PagedCache(model.config, capacity=batch * tokens, dtype=self.kv_dtype)


EXACT, INT8, INT4 = Accel(None, tolerance=0.05), Accel("int8", tolerance=0.15), Accel("int4", tolerance=0.9)
FP8 = Accel("fp8", tolerance=0.4)
DETERMINISTIC = Accel("int4", tolerance=0.9, deterministic=True)
SETUPS = (EXACT, INT8, FP8, INT4, DETERMINISTIC)

# In the topics that ask for them. The first runs the model of INT8 over another cache.
INT8_KV = Accel("int8", tolerance=0.15, kv_dtype="int8")
AUTO = Accel("auto", tolerance=0.15)
NOT_FUSED = Accel(None, tolerance=0.05, fuse=False)
