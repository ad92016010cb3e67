"""A model at one context and batch: what its cache, its weights and its passes come to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from ..cache.quantized import QUANTIZED
from .attention_bytes import AttentionLayer
from .roofline import Work
from .weights import WeightTensor


@dataclass(frozen=True, kw_only=True)
class Workload:
    tensors: tuple[WeightTensor, ...]
    layers: tuple[AttentionLayer, ...]
    weights: str | None  # how they are quantized
    dtype: torch.dtype
    kv_dtype: str | None  # of a quantized cache, a name of QUANTIZED
    context: int
    batch: int

    @property
    def weights_by_kind(self) -> dict[str, int]:
        return dict(sum((tensor.bytes_by_kind for tensor in self.tensors), Counter()))

    @property
    def kv_bytes(self) -> int:
        quantized = None if self.kv_dtype is None else QUANTIZED[self.kv_dtype]
        return self.batch * sum(layer.kv_bytes(dtype=self.dtype, quantized=quantized) for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        """Residual stream and its norm, and three times the widest output (gate, up and their product in an MLP)."""
        linears = [tensor for tensor in self.tensors if tensor.kind == "linears"]
        width = 2 * min(tensor.shape[1] for tensor in linears) + 3 * max(tensor.shape[0] for tensor in linears)
        return self.batch * self.context * width * self.dtype.itemsize

    @property
    def decode(self) -> Work:
        """One token for each sequence, `context` tokens being cached."""
        attention = sum(layer.decode_operations for layer in self.layers)
        weights = sum(tensor.operations_per_token for tensor in self.tensors)
        return Work(nbytes=self._bytes_read(self.batch), operations=self.batch * (attention + weights))

    @property
    def prefill(self) -> Work:
        """`context` tokens of each sequence; the head sees the last one only."""
        attention = sum(layer.prefill_operations(self.context) for layer in self.layers)
        weights = sum(
            tensor.operations_per_token * (1 if tensor.kind == "head" else self.context) for tensor in self.tensors
        )
        return Work(nbytes=self._bytes_read(self.batch * self.context), operations=self.batch * (attention + weights))

    def _bytes_read(self, tokens: int) -> float:
        return self.kv_bytes + sum(tensor.bytes_read(tokens=tokens) for tensor in self.tensors)
