"""A model at one context and batch: the bytes of its weights and its cache, and the work of its passes.

Weights are counted tensor by tensor, stored as they are or quantized, attention layer by layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ..cache.hf import layer_kind, layer_names
from ..cache.quantized import QUANTIZED, head_bytes
from ..config import WeightConfig
from ..errors import UnsupportedError
from ..linear import LinearSpec
from ..linear.backends.backend import FEW_ROWS
from ..linear.embedding import TABLE
from ..models import head_dim, num_kv_heads
from ..patching.embeddings import EmbeddingSite, find_table
from ..patching.survey import ExpertsSite, LinearSite, linear_sites, sites_for
from .roofline import Work
from .shapes import decoder_config

MULTIPLIED = ("linears", "experts", "head")  # the kinds that a token is multiplied with
TILE = 128  # rows and columns of scores that tiled attention holds at a time


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
    def attention_bytes(self) -> AttentionBytes:
        heads = self.batch * max(layer.heads for layer in self.layers)
        return AttentionBytes.of(context=self.context, heads=heads, dtype=self.dtype)

    @property
    def total_bytes(self) -> int:
        """The bytes of the weights, the KV cache, tiled attention and the activations."""
        return sum(self.weights_by_kind.values()) + self.kv_bytes + self.attention_bytes.tiled + self.activation_bytes

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
        """Return the bytes of weights that a pass over `tokens` tokens is expected to read: each expert is as likely
        as the others.
        """
        return sum(size * (1 - (1 - share) ** tokens) for share, size in self._bytes_by_share.items())

    @cached_property
    def _bytes_by_share(self) -> Counter[float]:
        """The bytes of the weights by the share of them that one token uses; of embeddings that is nothing."""
        found: Counter[float] = Counter()
        for tensor in self.tensors:
            stored = tensor.bytes_by_kind
            found[tensor.share_per_token] += stored.total() - stored["embeddings"]
        return found

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


# -- weights -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WeightTensor:
    """One parameter.

    kind: "linears", "experts", "head", "embeddings" or "other" (norms, biases, routers).
    shape: as stored, but [outputs, inputs] for every kind of linear.
    spec: how it is quantized; None: it stays as it is.
    tied: a head that is the embedding table too. top_k: of experts, how many a token takes.
    """

    kind: str
    shape: tuple[int, ...]
    itemsize: int
    spec: LinearSpec | None = None
    tied: bool = False
    top_k: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes_by_kind(self) -> Counter[str]:
        """Stored bytes."""
        plain = self.numel * self.itemsize
        if self.spec is None:
            return Counter({self.kind: plain})
        integers = self.spec.integer_bytes
        if self.kind == "embeddings":
            return Counter({self.kind: self.spec.weight_bytes})
        stored = Counter({self.kind: integers, "scales": self.spec.weight_bytes - integers})
        if self.tied:
            stored["embeddings"] = plain  # looked up by token, so that the table stays as it is
        return stored

    @property
    def share_per_token(self) -> float:
        """The share of the numbers that one token uses: a part of the experts, all of everything else."""
        return min(1.0, self.top_k / self.shape[0]) if self.kind == "experts" else 1.0

    @property
    def operations_per_token(self) -> float:
        return 2 * self.numel * self.share_per_token if self.kind in MULTIPLIED else 0.0


def weight_tensors(
    model: PreTrainedModel,
    config: WeightConfig | None,
    held: Mapping[str, LinearSpec] | None = None,
    tables: Collection[str] = (),
) -> Iterator[WeightTensor]:
    """List every parameter of `model` once, quantized as `config` says, or as the quantized layers are that it has.

    held: the specs of these layers, by name. tables: embeddings without a weight, which look their rows up in a head.
    Raises UnsupportedError for a model whose linears are quantized, and for experts without a known number per token.
    """
    for name, module in model.named_modules():
        weights = list(module._parameters.values())
        lacks = isinstance(module, nn.Linear) and "weight" not in module._parameters
        if lacks or any(type(weight) is not nn.Parameter for weight in weights if weight is not None):
            raise UnsupportedError(
                f"{name} of this model holds no plain weight but what another library makes of it; pass model.config, "
                "and the model is counted before that"
            )
    found = linear_sites(model, ()) if config is None else sites_for(model, config)
    sites = {id(site.parameter): site for site in found}
    table = None if config is None else find_table(model, config, sites.values())
    shared = None if table is None or table.refusal is not None else table.site
    if isinstance(shared, EmbeddingSite):
        sites[id(shared.parameter)] = shared
    seen: set[int] = set()
    for name, module in model.named_modules():
        for parameter in () if name in tables else module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                site = sites.get(id(parameter))
                counted = _tensor(model, module, parameter) if site is None else _linear(model, site, config, shared)
                if held:
                    spec = held.get(f"{name}.{TABLE}" if site is None else site.name)
                    counted = replace(counted, spec=spec, tied=counted.tied and not tables)
                yield counted


def _linear(
    model: PreTrainedModel, site: LinearSite, config: WeightConfig | None, table: LinearSite | None
) -> WeightTensor:
    """Count the weight of a site. table: the one that the input embedding looks its rows up in, if it is quantized."""
    kept, shape = config if config is None or not site.is_head else config.for_head, tuple(site.weight.shape)
    if isinstance(site, EmbeddingSite):
        assert config is not None and config.for_embedding is not None
        stored = LinearSpec.of(site.weight, config.for_embedding)
        return WeightTensor(kind="embeddings", shape=shape, itemsize=site.weight.itemsize, spec=stored)
    if isinstance(site, ExpertsSite):
        return _experts(model, site, kept)
    spec = None if kept is None or site.skip is not None else LinearSpec.of(site.weight, kept)
    kind, is_tied = "head" if site.is_head else "linears", site.is_tied and site is not table
    return WeightTensor(kind=kind, shape=shape, itemsize=site.weight.itemsize, spec=spec, tied=is_tied)


def _experts(model: PreTrainedModel, site: ExpertsSite, config: WeightConfig | None) -> WeightTensor:
    """Count a weight of experts, with the spec of the stored one, [experts * out, in]."""
    weight, spec = site.matrices(site.parameter)[0], None
    group_size = None if config is None else config.layout.group_size
    fits = group_size is None or weight.shape[1] % group_size == 0
    if config is not None and fits and site.skip is None and not config.is_nf4:
        one = LinearSpec.of(weight, config)
        spec = replace(one, out_features=site.count * one.out_features)
    top_k = _experts_per_token(model)
    shape = tuple(site.weight.shape)
    return WeightTensor(kind="experts", shape=shape, itemsize=weight.itemsize, spec=spec, top_k=top_k)


def _tensor(model: PreTrainedModel, module: nn.Module, parameter: nn.Parameter) -> WeightTensor:
    shape, itemsize = tuple(parameter.shape), parameter.itemsize
    if type(module).__name__.endswith("Experts"):  # fused: every parameter has a row per expert
        return WeightTensor(kind="experts", shape=shape, itemsize=itemsize, top_k=_experts_per_token(model))
    kind = "embeddings" if isinstance(module, nn.Embedding) else "other"
    return WeightTensor(kind=kind, shape=shape, itemsize=itemsize)


def _experts_per_token(model: PreTrainedModel) -> int:
    config = decoder_config(model)
    top_k = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    if not top_k:
        raise UnsupportedError(f"{type(config).__name__} does not say how many experts a token takes")
    return int(top_k)


# -- attention -----------------------------------------------------------------------------------------


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


class ConvolutionLayer(AttentionLayer):
    """One layer with a short convolution, whose inputs stay in pages as they are."""

    def kv_bytes(self, *, dtype: torch.dtype, quantized: torch.dtype | None) -> int:
        """Return the bytes of the inputs that one sequence keeps, in `dtype` whatever the pages of others have."""
        return super().kv_bytes(dtype=dtype, quantized=None)


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
        if type(layer).__name__ == "DummyLayer":
            continue
        kind = layer_kind(layer, name, config)
        if kind is None:
            raise UnsupportedError(f"{type(config).__name__} has {type(layer).__name__} layers, unknown to estimate()")
        tokens = context if kind.window is None else min(context, kind.window)
        make = _recurrent if kind.recurs else _convolution if kind.convolves else _layer
        layers.append(make(shape, tokens=tokens))
    return layers


def encoder_layers(config: Any, *, context: int) -> list[AttentionLayer]:
    """Return the layers of an encoder, which caches nothing."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "local_attention", None) or context  # ModernBERT's, of both sides together
    seen = {True: min(context, window), False: context}
    return [_layer(config, tokens=seen["sliding" in kind], caches=False) for kind in kinds]


def _convolution(config: Any, *, tokens: int) -> AttentionLayer:
    """Return the layer whose one head has half of the inputs of a short convolution as keys, and half as values."""
    return ConvolutionLayer(heads=1, kv_heads=1, head_dim=config.hidden_size // 2, tokens=tokens)


def _recurrent(config: Any, *, tokens: int) -> AttentionLayer:
    """Return the layer whose one head has a state, and the inputs of the convolution before it that go with it."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    inputs = (config.linear_conv_kernel_dim - 1) * (2 * keys + values)
    return RecurrentLayer(heads=1, kv_heads=1, head_dim=config.linear_key_head_dim * values + inputs, tokens=tokens)


def _layer(config: Any, *, tokens: int, caches: bool = True) -> AttentionLayer:
    heads, kv_heads = config.num_attention_heads, num_kv_heads(config)
    return AttentionLayer(heads=heads, kv_heads=kv_heads, head_dim=head_dim(config), tokens=tokens, caches=caches)
