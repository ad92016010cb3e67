"""Another runtime behind as much of a transformers model's interface as the benchmarks use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .base import Setup


class RuntimeCache(ABC):
    """Keys and values of `batch` sequences that hold `length` tokens each."""

    batch: int
    length: int = 0

    @abstractmethod
    def decode(self, ids: Tensor, *, keep: int) -> Tensor:
        """Logits [B, keep, vocab] of the last `keep` of the tokens [B, T]; gone after the next call."""

    @abstractmethod
    def fill(self, tokens: int, *, seed: int) -> None:
        """Random keys and values for `tokens` tokens of each sequence."""


class RuntimeModel(ABC):
    """config, dtype: of the model that the runtime's files were made from; nbytes: of weights."""

    dtype = torch.bfloat16

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config: Any = config
        self.nbytes = 0

    @abstractmethod
    def new_cache(self, *, batch: int, tokens: int) -> RuntimeCache:
        """Empty, for `batch` sequences of at most `tokens` tokens."""

    def __call__(
        self, *, input_ids: Tensor, past_key_values: Any = None, logits_to_keep: int = 0, **_: Any
    ) -> SimpleNamespace:
        rows, columns = input_ids.shape
        cache = past_key_values or self.new_cache(batch=rows, tokens=columns)
        return SimpleNamespace(logits=cache.decode(input_ids, keep=logits_to_keep or columns).clone())

    def generate(
        self, prompt: Tensor, *, max_new_tokens: int, streamer: Any, past_key_values: Any = None, **_: Any
    ) -> Tensor:
        """Greedy; exactly `max_new_tokens`, which the streamer gets as from transformers."""
        rows, columns = prompt.shape
        cache = past_key_values or self.new_cache(batch=rows, tokens=columns + max_new_tokens)
        streamer.put(prompt)
        pieces, ids = [prompt], prompt[:, cache.length :]
        for _ in range(max_new_tokens):
            ids = cache.decode(ids, keep=1)[:, -1].argmax(-1, keepdim=True)
            streamer.put(ids)
            pieces.append(ids)
        return torch.cat(pieces, dim=1)


class RuntimeSetup(Setup):
    is_peer = True
    attends = True

    def new_cache(self, model: Any, *, batch: int, tokens: int) -> Any:
        return model.new_cache(batch=batch, tokens=tokens)

    def filled_cache(self, model: Any, *, batch: int, tokens: int, room: int, seed: int = 0) -> Any:
        cache = self.new_cache(model, batch=batch, tokens=tokens + room)
        cache.fill(tokens, seed=seed)
        return cache

    def weight_bytes(self, model: Any) -> int:
        return int(model.nbytes)
