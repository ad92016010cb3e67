"""A model at one context and batch: the bytes of its cache and weights, and the work of its passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch

from ..cache.quantized import QUANTIZED
from ..linear.backends.backend import FEW_ROWS
from .attention_bytes import AttentionLayer
from .roofline import Work
from .weights import WeightTensor


@dataclass(frozen=True, kw_only=True)
class Workload:
    """weights: how they are quantized, by name; kv_dtype: of a quantized cache, a name of QUANTIZED."""

    tensors: tuple[WeightTensor, ...]
    layers: tuple[AttentionLayer, ...]
    weights: str | None
    dtype: torch.dtype
    kv_dtype: str | None
    context: int
    batch: int

    def at(self, *, context: int, batch: int) -> Workload:
        """Return the same workload at another context, at most the model's."""
        layers = tuple(replace(layer, tokens=min(layer.tokens, context)) for layer in self.layers)
        return replace(self, layers=layers, context=context, batch=batch)

    @property
    def decodes(self) -> bool:
        """True if it is a decoder's; an encoder has passes of `context` tokens alone."""
        return all(layer.caches for layer in self.layers)

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
        """Return the work of a decode step: one token for each sequence, with `context` tokens cached."""
        attention = sum(layer.decode_operations for layer in self.layers)
        return self._work(1, attention)

    @property
    def prefill(self) -> Work:
        """Return the work of a prefill: `context` tokens of each sequence; a decoder's head sees only the last one."""
        attention = sum(layer.prefill_operations(self.context) for layer in self.layers)
        return self._work(self.context, attention)

    def weight_bytes_read(self, tokens: float) -> float:
        """Return the bytes of weights that a pass over `tokens` tokens reads."""
        return sum(tensor.bytes_read(tokens=tokens) for tensor in self.tensors)

    def _work(self, tokens: int, attention: int) -> Work:
        """Return the work of a pass over `tokens` tokens of each sequence.

        attention: operations of all layers for one sequence.
        """
        each = [
            (t, t.operations_per_token * (1 if t.kind == "head" and self.decodes else tokens)) for t in self.tensors
        ]
        quantized = sum(operations for tensor, operations in each if tensor.spec is not None)
        fp8 = sum(operations for tensor, operations in each if _rounds_to_fp8(tensor, self.batch * tokens))
        total = attention + sum(operations for _, operations in each)
        nbytes = self.kv_bytes + self.weight_bytes_read(self.batch * tokens)
        return Work(
            nbytes,
            self.batch * total,
            self.batch * quantized,
            self.batch * attention,
            rows=self.batch * tokens,
            queries=tokens,
            layers=len(self.layers),
            fp8=self.batch * fp8,
        )


def _rounds_to_fp8(tensor: WeightTensor, rows: float) -> bool:
    """Return whether a pass of so many rows multiplies in FP8: only calls of many rows do, unless all must."""
    spec = tensor.spec
    if spec is None or spec.layout.format != "fp8" or spec.activations is None:
        return False
    return spec.activations == "fp8" or rows * tensor.share_per_token > FEW_ROWS
