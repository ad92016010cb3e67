"""The layers of a model that attend or keep a state: the bytes that each keeps of a sequence, and its operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import DynamicCache

from ..cache.hf import kinds_of_layer, layer_names
from ..cache.kinds import KeysAndValues, Kind
from ..cache.kinds.kind import TokenNumbers
from ..cache.quantized import PageDtypes, dims_refusal
from ..errors import UnsupportedError


@dataclass(frozen=True)
class StatefulLayer:
    """One layer that attends or keeps a state; `tokens` are what a query sees of a sequence (at most its window).

    numbers: what its pages hold of a token. kind: of the pages; None if it keeps nothing for later tokens, and each
    query sees tokens on both sides. is_fixed: whether the tokens are of an input of one length, as the frames of a
    sound, however long the context is.
    """

    numbers: TokenNumbers
    tokens: int
    kind: Kind | None
    is_fixed: bool = False

    def kv_bytes(self, *, dtype: torch.dtype, quantized: PageDtypes | None) -> int:
        """Return the bytes that the layer keeps of one sequence.

        quantized: the dtypes of pages with a scale per token and head.
        """
        return self.tokens * self.numbers.token_bytes(dtype, quantized) if self.kind is not None else 0

    def dtype_refusal(self, quantized: PageDtypes | None) -> str | None:
        """Return why its pages cannot have quantized dtypes, as one clause; None if they can."""
        if quantized is None or self.kind is None or not self.numbers.quantizes:
            return None
        numbers = self.numbers
        return self.kind.dtype_refusal(quantized) or dims_refusal(numbers.keys, numbers.values, quantized)

    @property
    def decode_operations(self) -> int:
        """Return the operations of one query."""
        return self.numbers.pair_operations * self.tokens

    def prefill_operations(self, context: int) -> int:
        """Return the operations of `context` queries, each of which sees itself and the tokens before it within the
        window.
        """
        pairs = self.tokens * context
        if self.kind is not None:
            pairs -= self.tokens * (self.tokens - 1) // 2
        return self.numbers.pair_operations * pairs


class AttendsToSource(StatefulLayer):
    """One layer of a decoder that attends to an encoder's output, of which it keeps keys and values once.

    tokens: those of the source.
    """

    def prefill_operations(self, context: int) -> int:
        """Return the operations of the first token, which is all that a decoder computes with its source."""
        return self.decode_operations


def attention_layers(config: Any, *, context: int) -> list[StatefulLayer]:
    """Return the layers that have a cache of their own, as transformers' cache counts them.

    Layers that reuse another's keys and values are left out. Raises UnsupportedError for layers of other kinds.
    """
    layers: list[StatefulLayer] = []
    cache = cast(Any, DynamicCache(config=config))
    # Layers that reuse others' come last. The cache of older transformers ends before them.
    names = layer_names(config, len(cache.layers))
    for layer, shape, name in zip(cache.layers, config.per_layer_config, names, strict=False):
        kinds = kinds_of_layer(layer, name, config)
        if kinds is None:
            raise UnsupportedError(f"{type(config).__name__} has {type(layer).__name__} layers, unknown to estimate()")
        for kind in kinds:
            tokens = context if kind.window is None else min(context, kind.window)
            layers.append(StatefulLayer(kind.numbers(shape), tokens, kind))
    return layers


def encoder_layers(config: Any, *, context: int) -> list[StatefulLayer]:
    """Return the layers of an encoder, which caches nothing."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "local_attention", None) or context  # ModernBERT's, of both sides together
    seen = {True: min(context, window), False: context}
    numbers = KeysAndValues(None).numbers(config)
    return [StatefulLayer(numbers, seen["sliding" in kind], None) for kind in kinds]


def encoder_decoder_layers(config: Any, *, context: int, source: int | None) -> list[StatefulLayer]:
    """Return the layers of an encoder, and those of its decoder: each attends to its own tokens and to the source.

    context: tokens of the decoder. source: those of the encoder's input if it has one length; None: the context.
    """
    tokens, fixed = source or context, source is not None
    encoder, decoder = config.get_text_config(encoder=True), config.get_text_config(decoder=True)
    count = getattr(decoder, "num_decoder_layers", None) or decoder.num_hidden_layers  # T5 has both
    kept = attention_layers(decoder, context=context)
    own = [kept[min(index, len(kept) - 1)] for index in range(count)]
    once = KeysAndValues(None)
    crossing = [AttendsToSource(once.numbers(decoder), tokens, once, is_fixed=fixed) for _ in range(count)]
    read = [replace(layer, is_fixed=fixed) for layer in encoder_layers(encoder, context=tokens)]
    return [*read, *own, *crossing]
