"""The layers of a model that attend or keep a state: the bytes that each keeps of a sequence, and its operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import DynamicCache

from ..cache.hf import kinds_of_layer, layer_names
from ..cache.hf.state_sizes import state_sizes
from ..cache.quantized import head_bytes
from ..errors import UnsupportedError
from ..models import head_dim, num_kv_heads


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One layer that attends; `tokens` are what a query sees of a sequence (at most the layer's window).

    caches: whether it keeps keys and values for later tokens; else each query sees tokens on both sides. is_fixed:
    whether they are of an input of one length, as the frames of a sound, however long the context is.
    """

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    caches: bool = True
    is_fixed: bool = False

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


class SourceLayer(AttentionLayer):
    """One layer of a decoder that attends to an encoder's output, of which it keeps keys and values once.

    tokens: those of the source.
    """

    def prefill_operations(self, context: int) -> int:
        """Return the operations of the first token, which is all that a decoder computes with its source."""
        return self.decode_operations


class ConvolutionLayer(AttentionLayer):
    """One layer with a short convolution, whose inputs stay in pages as they are."""

    def kv_bytes(self, *, dtype: torch.dtype, quantized: torch.dtype | None) -> int:
        """Return the bytes of the inputs that one sequence keeps, in `dtype` whatever the pages of others have."""
        return super().kv_bytes(dtype=dtype, quantized=None)


@dataclass(frozen=True, kw_only=True)
class CompressedLayer(AttentionLayer):
    """One layer that keeps compressed keys, of which head_dim counts those that all heads read as one head.

    rank: how many of their numbers are read as values too.
    """

    rank: int

    def kv_bytes(self, *, dtype: torch.dtype, quantized: torch.dtype | None) -> int:
        """Return the bytes of the compressed keys of one sequence; pages with scales have room for values' as well."""
        sizes = (self.head_dim, 0) if quantized else (self.head_dim,)
        return self.tokens * sum(head_bytes(size, dtype, quantized) for size in sizes)

    @property
    def decode_operations(self) -> int:
        return 2 * self.heads * (self.head_dim + self.rank) * self.tokens

    def prefill_operations(self, context: int) -> int:
        pairs = self.tokens * context - self.tokens * (self.tokens - 1) // 2
        return 2 * self.heads * (self.head_dim + self.rank) * pairs


class RecurrentLayer(AttentionLayer):
    """One layer that keeps a state after each of `tokens` tokens; head_dim: the numbers of one, in float32."""

    def kv_bytes(self, *, dtype: torch.dtype, quantized: torch.dtype | None) -> int:
        """Return the bytes of the states that one sequence keeps, whatever `dtype` the pages of others have."""
        return self.tokens * self.head_dim * torch.float32.itemsize


def attention_layers(config: Any, *, context: int) -> list[AttentionLayer]:
    """Return the layers that have a cache of their own, as transformers' cache counts them.

    Layers that reuse another's keys and values are left out. Raises UnsupportedError for layers of other kinds.
    """
    layers, cache = [], cast(Any, DynamicCache(config=config))
    # Layers that reuse others' come last. The cache of older transformers ends before them.
    names = layer_names(config, len(cache.layers))
    for layer, shape, name in zip(cache.layers, config.per_layer_config, names, strict=False):
        kinds = kinds_of_layer(layer, name, config)
        if kinds is None:
            raise UnsupportedError(f"{type(config).__name__} has {type(layer).__name__} layers, unknown to estimate()")
        for kind in kinds:
            tokens = context if kind.window is None else min(context, kind.window)
            make = _layer if kind.rank is None else _compressed
            make = _recurrent if kind.recurs else _convolution if kind.convolves else make
            make = _indexer if kind.indexes else make
            layers.append(make(shape, tokens=tokens))
    return layers


def encoder_layers(config: Any, *, context: int) -> list[AttentionLayer]:
    """Return the layers of an encoder, which caches nothing."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "local_attention", None) or context  # ModernBERT's, of both sides together
    seen = {True: min(context, window), False: context}
    return [_layer(config, tokens=seen["sliding" in kind], caches=False) for kind in kinds]


def encoder_decoder_layers(config: Any, *, context: int, source: int | None) -> list[AttentionLayer]:
    """Return the layers of an encoder, and those of its decoder: each attends to its own tokens and to the source.

    context: tokens of the decoder. source: those of the encoder's input if it has one length; None: the context.
    """
    tokens, fixed = source or context, source is not None
    encoder, decoder = config.get_text_config(encoder=True), config.get_text_config(decoder=True)
    count = getattr(decoder, "num_decoder_layers", None) or decoder.num_hidden_layers  # T5 has both
    kept = attention_layers(decoder, context=context)
    own = [kept[min(index, len(kept) - 1)] for index in range(count)]
    shape = _layer(decoder, tokens=tokens)
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    crossing = [SourceLayer(**sizes, tokens=tokens, is_fixed=fixed) for _ in range(count)]
    read = [replace(layer, is_fixed=fixed) for layer in encoder_layers(encoder, context=tokens)]
    return [*read, *own, *crossing]


def _convolution(config: Any, *, tokens: int) -> AttentionLayer:
    """Return the layer whose one head has half of the inputs of a short convolution as keys, and half as values."""
    return ConvolutionLayer(heads=1, kv_heads=1, head_dim=config.hidden_size // 2, tokens=tokens)


def _indexer(config: Any, *, tokens: int) -> AttentionLayer:
    """Return the layer whose one head has half of an indexer's key as a key, and half as a value."""
    return ConvolutionLayer(heads=1, kv_heads=1, head_dim=config.index_head_dim // 2, tokens=tokens)


def _compressed(config: Any, *, tokens: int) -> AttentionLayer:
    """Return the layer whose one head has the numbers that keys and values are made from, and the rotated ones."""
    size = config.kv_lora_rank + config.qk_rope_head_dim
    return CompressedLayer(
        heads=config.num_attention_heads, kv_heads=1, head_dim=size, tokens=tokens, rank=config.kv_lora_rank
    )


def _recurrent(config: Any, *, tokens: int) -> AttentionLayer:
    """Return the layer whose one head has a state, and the inputs of the convolution before it that go with it."""
    sizes = state_sizes(config)
    assert sizes is not None  # which made it a layer with a state
    return RecurrentLayer(heads=1, kv_heads=1, head_dim=sum(sizes), tokens=tokens)


def _layer(config: Any, *, tokens: int, caches: bool = True) -> AttentionLayer:
    heads, kv_heads = config.num_attention_heads, num_kv_heads(config)
    return AttentionLayer(heads=heads, kv_heads=kv_heads, head_dim=head_dim(config), tokens=tokens, caches=caches)
