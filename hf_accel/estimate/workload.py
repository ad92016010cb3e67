"""A model at one context and batch: the bytes of its weights and its cache, and the work of its passes.

Weights are counted tensor by tensor, stored as they are or quantized, attention layer by layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..cache.quantized import QUANTIZED
from ..config import WeightConfig
from ..errors import UnsupportedError
from ..linear import LinearSpec
from ..linear.backends.backend import FEW_ROWS
from ..models import experts_per_token
from ..patching.survey import linear_sites, sites_named
from ..patching.weight_plan import weight_plans
from ..patching.weight_sites import LinearSite
from .layer_bytes import AttendsToSource, StatefulLayer
from .roofline import Work
from .shapes import source_modules

MULTIPLIED = ("linears", "experts", "head")  # the kinds that a token is multiplied with
TILE = 128  # rows and columns of scores that tiled attention holds at a time


@dataclass(frozen=True, kw_only=True)
class Workload:
    """weights: how they are quantized, by name; kv_dtype: of a quantized cache, a name of QUANTIZED."""

    tensors: tuple[WeightTensor, ...]
    layers: tuple[StatefulLayer, ...]
    weights: str | None
    dtype: torch.dtype
    kv_dtype: str | None
    context: int
    batch: int

    def at(self, *, context: int, batch: int) -> Workload:
        """Return the same workload at another context, at most the model's."""
        cut = (layer if layer.is_fixed else replace(layer, tokens=min(layer.tokens, context)) for layer in self.layers)
        layers = tuple(cut)
        return replace(self, layers=layers, context=context, batch=batch)

    @property
    def decodes(self) -> bool:
        """True if it has a decoder; an encoder has passes of `context` tokens alone."""
        return any(layer.kind is not None for layer in self.layers)

    @property
    def source_tokens(self) -> int | None:
        """The tokens that an encoder reads for a decoder; None without both."""
        return next((layer.tokens for layer in self.layers if isinstance(layer, AttendsToSource)), None)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of each sequence that a prefill computes: those of the source, or of the context."""
        return self.source_tokens or self.context

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
        return self.batch * self.prompt_tokens * width * self.dtype.itemsize

    @property
    def attention_bytes(self) -> AttentionBytes:
        heads = self.batch * max(layer.numbers.queries for layer in self.layers)
        return AttentionBytes.of(context=self.prompt_tokens, heads=heads, dtype=self.dtype)

    @property
    def total_bytes(self) -> int:
        """The bytes of the weights, the KV cache, tiled attention and the activations."""
        return sum(self.weights_by_kind.values()) + self.kv_bytes + self.attention_bytes.tiled + self.activation_bytes

    @property
    def decode(self) -> Work:
        """Return the work of a decode step: one token for each sequence, with `context` tokens cached."""
        attention = sum(layer.decode_operations for layer in self.layers if layer.kind is not None)
        return self._work(1, attention)

    @property
    def prefill(self) -> Work:
        """Return the work of a prefill: `context` tokens of each sequence; a decoder's head sees only the last one.

        With an encoder it is a pass over the source, and the decoder's first token.
        """
        tokens = self.prompt_tokens
        begun = self.layers if self.source_tokens is None else [each for each in self.layers if not _is_own(each)]
        return self._work(tokens, sum(layer.prefill_operations(tokens) for layer in begun), reads_source=True)

    def weight_bytes_read(self, tokens: float) -> float:
        """Return the bytes of weights that a pass over `tokens` tokens is expected to read: each expert is as likely
        as the others.
        """
        return sum(size * (1 - (1 - share) ** tokens) for share, size in self._bytes_by_share.items())

    @cached_property
    def _bytes_by_share(self) -> Counter[float]:
        """The bytes of the weights by the share of them that one token uses; of embeddings that is nothing.

        Those that a source alone is multiplied by are left out.
        """
        found: Counter[float] = Counter()
        for tensor in self.tensors:
            if not tensor.of_source:
                found[tensor.share_per_token] += tensor.bytes_read
        return found

    def _tokens_of(self, tensor: WeightTensor, tokens: int, *, reads_source: bool) -> int:
        """Return the tokens of each sequence that a pass multiplies by a weight."""
        if tensor.of_source:
            return tokens if reads_source else 0
        is_first = reads_source and self.source_tokens is not None
        return 1 if is_first or (tensor.kind == "head" and self.decodes) else tokens

    def _work(self, tokens: int, attention: int, *, reads_source: bool = False) -> Work:
        """Return the work of a pass over `tokens` tokens of each sequence.

        attention: operations of all layers for one sequence. reads_source: whether an encoder reads these tokens.
        """
        each = [
            (t, t.operations_per_token * self._tokens_of(t, tokens, reads_source=reads_source)) for t in self.tensors
        ]
        quantized = sum(operations for tensor, operations in each if tensor.spec is not None)
        fp8 = sum(operations for tensor, operations in each if _rounds_to_fp8(tensor, self.batch * tokens))
        total = attention + sum(operations for _, operations in each)
        nbytes = self.kv_bytes + self.weight_bytes_read(self.batch * tokens)
        nbytes += sum(tensor.bytes_read for tensor in self.tensors if tensor.of_source and reads_source)
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


def _is_own(layer: StatefulLayer) -> bool:
    """Return whether it is a decoder's layer that attends to the decoder's own tokens."""
    return layer.kind is not None and not isinstance(layer, AttendsToSource)


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
    tied: a head that is the embedding table too. top_k: of experts, how many a token takes. of_source: whether the
    tokens that an encoder reads are all that it is multiplied by, once.
    """

    kind: str
    shape: tuple[int, ...]
    itemsize: int
    spec: LinearSpec | None = None
    tied: bool = False
    top_k: int = 0
    of_source: bool = False

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
    def bytes_read(self) -> int:
        """The stored bytes of which a pass may read all: of embeddings it reads a few rows."""
        stored = self.bytes_by_kind
        return stored.total() - stored["embeddings"]

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
    found = [] if config is None else weight_plans(model, config).weights
    specs = {id(planned.site.parameter): planned.whole for planned in found}
    sites = {id(site.parameter): site for site in sites_named(model, held or ()).values()}
    plain = linear_sites(model, ()) if config is None else [planned.site for planned in found]
    sites |= {id(site.parameter): site for site in plain}
    seen: set[int] = set()
    of_source = source_modules(model)
    for name, module in model.named_modules():
        for parameter in () if name in tables else module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                site = sites.get(id(parameter))
                counted = (
                    _tensor(model, module, parameter)
                    if site is None
                    else _weight(model, site, specs.get(id(parameter)))
                )
                if held:
                    spec = None if site is None else held.get(site.name)
                    counted = replace(counted, spec=spec, tied=counted.tied and not tables)
                yield replace(counted, of_source=True) if module in of_source else counted


def _weight(model: PreTrainedModel, site: LinearSite, spec: LinearSpec | None) -> WeightTensor:
    """Count the weight of a site. spec: how it is quantized, if it is."""
    return WeightTensor(
        kind=site.counted_as,
        shape=tuple(site.weight.shape),
        itemsize=site.parameter.itemsize,
        spec=spec,
        tied=site.keeps_original,
        top_k=_top_k(model) if site.of_experts else 0,
    )


def _tensor(model: PreTrainedModel, module: nn.Module, parameter: nn.Parameter) -> WeightTensor:
    shape, itemsize = tuple(parameter.shape), parameter.itemsize
    if type(module).__name__.endswith("Experts"):  # fused: every parameter has a row per expert
        return WeightTensor(kind="experts", shape=shape, itemsize=itemsize, top_k=_top_k(model))
    kind = "embeddings" if isinstance(module, nn.Embedding) else "other"
    return WeightTensor(kind=kind, shape=shape, itemsize=itemsize)


def _top_k(model: PreTrainedModel) -> int:
    top_k = experts_per_token(model.config)
    if top_k is None:
        raise UnsupportedError(f"{type(model.config).__name__} does not say how many experts a token takes")
    return top_k


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
