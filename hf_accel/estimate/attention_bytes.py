"""Bytes and operations of attention: the KV cache layer by layer, and the scratch memory of a prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..cache.hf.room import num_kv_heads
from ..cache.quantized import head_bytes
from ..errors import UnsupportedError

TILE = 128  # rows and columns of scores that tiled attention holds at a time


class AttentionBytes(NamedTuple):
    """Scratch memory of one layer's attention in a prefill of the whole context.

    naive: the scores [batch, heads, context, context]; naive_per_head: of one head of one sequence.
    tiled: a float32 log-sum-exp per row and a tile of scores per head (FlashAttention, arXiv:2205.14135).
    """

    naive: int
    naive_per_head: int
    tiled: int

    @classmethod
    def of(cls, *, context: int, heads: int, dtype: torch.dtype) -> AttentionBytes:
        """Count the bytes for `heads` heads, those of all sequences of the batch together."""
        per_head = context * context * dtype.itemsize
        tile = min(context, TILE) ** 2
        return cls(naive=heads * per_head, naive_per_head=per_head, tiled=heads * 4 * (context + tile))


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One layer that attends; `tokens` are what a query sees of a sequence (at most the layer's window).

    caches: whether it keeps keys and values for later tokens; else each query sees tokens on both sides.
    """

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    caches: bool = True

    def kv_bytes(self, *, dtype: torch.dtype, quantized: torch.dtype | None) -> int:
        """Return the bytes of the keys and values of one sequence.

        quantized: the dtype of pages with a scale per token and head.
        """
        if not self.caches:
            return 0
        return 2 * self.kv_heads * self.tokens * head_bytes(self.head_dim, dtype, quantized)

    @property
    def decode_operations(self) -> int:
        """Return the operations of one query: two products, and two operations per multiply-add."""
        return 4 * self.heads * self.head_dim * self.tokens

    def prefill_operations(self, context: int) -> int:
        """Return the operations of `context` queries, each of which sees itself and the tokens before it within the
        window.
        """
        pairs = self.tokens * context
        if self.caches:
            pairs -= self.tokens * (self.tokens - 1) // 2
        return 4 * self.heads * self.head_dim * pairs


def attention_layers(config: Any, *, context: int) -> list[AttentionLayer]:
    """Return the layers that have a cache of their own, as transformers' cache counts them.

    Layers that reuse another's keys and values are left out. Raises UnsupportedError for recurrent and other layers.
    """
    layers, cache = [], cast(Any, DynamicCache(config=config))
    # Layers that reuse others' come last. The cache of older transformers ends before them.
    for layer, shape in zip(cache.layers, config.per_layer_config, strict=False):
        if type(layer).__name__ == "DummyLayer":
            continue
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedError(f"{type(config).__name__} has {type(layer).__name__} layers, unknown to estimate()")
        tokens = min(context, layer.sliding_window) if layer.is_sliding else context
        layers.append(_layer(shape, tokens=tokens))
    return layers


def encoder_layers(config: Any, *, context: int) -> list[AttentionLayer]:
    """Return the layers of an encoder, which caches nothing."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "local_attention", None) or context  # ModernBERT's, of both sides together
    seen = {True: min(context, window), False: context}
    return [_layer(config, tokens=seen["sliding" in kind], caches=False) for kind in kinds]


def _layer(config: Any, *, tokens: int, caches: bool = True) -> AttentionLayer:
    heads = config.num_attention_heads
    return AttentionLayer(
        heads=heads,
        kv_heads=num_kv_heads(config),
        head_dim=getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads,
        tokens=tokens,
        caches=caches,
    )
