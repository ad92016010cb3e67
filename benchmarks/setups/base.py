"""What a setup is."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from ..harness.models import read_bytes, weight_bytes


class Setup(ABC):
    """One way to run a model.

    tolerance: what its logits may differ from stock's, relative to their norm; more and it is not timed. Random
        weights spread rounding errors from layer to layer more than trained ones do.
    exact: its greedy tokens must be stock's, but for near-ties.
    is_peer: another library, which quick runs leave out.
    only_named: why it takes part only if --setups names it.
    attends: it has an attention of its own; others attend as stock does.
    multiplies: "float" or "integer", the kind of product that most of its time goes to.
    kv_dtype: of its cache, as hf_accel.estimate takes it.
    """

    name: str
    tolerance: float
    exact: bool = False
    is_peer: bool = False
    only_named: str | None = None
    attends: bool = False
    multiplies: str = "float"
    kv_dtype: str = "auto"

    def refuses(self, config: PreTrainedConfig) -> str | None:
        """None, or why it cannot run a model of this config here."""
        return None

    @abstractmethod
    def prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model, changed in place or loaded anew; its Parameters belong to others too and stay as they are."""

    def new_cache(self, model: PreTrainedModel, *, batch: int, tokens: int) -> Any:
        """Empty, for `batch` sequences of at most `tokens` tokens."""
        return DynamicCache(config=model.config)

    def filled_cache(self, model: PreTrainedModel, *, batch: int, tokens: int, room: int, seed: int = 0) -> Any:
        """With random keys and values: a decode step costs the same with them, and a prefill takes long.

        tokens: that each of `batch` sequences holds; room: for so many more.
        """
        config: Any = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        shape = (batch, heads, tokens, head_dim)
        keys = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(model.device, model.dtype)
        cache = self.new_cache(model, batch=batch, tokens=tokens + room)
        for layer in range(config.num_hidden_layers):
            cache.update(keys, keys, layer)
        return cache

    def weight_bytes(self, model: PreTrainedModel) -> int:
        return weight_bytes(model)

    def read_bytes(self, model: PreTrainedModel) -> int:
        """Bytes of weights that a decode step reads."""
        return read_bytes(model)


def missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"{package} is not installed"
