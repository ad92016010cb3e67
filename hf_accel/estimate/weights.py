"""Bytes and operations of a model's weights, stored as they are or quantized, counted tensor by tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from ..config import WeightConfig
from ..errors import UnsupportedError
from ..linear import LinearSpec
from ..patching.survey import linear_sites, sites_for
from ..patching.weight_sites import ExpertsSite, LinearSite
from .shapes import decoder_config

MULTIPLIED = ("linears", "experts", "head")  # the kinds that a token is multiplied with


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

    def bytes_read(self, *, tokens: float) -> float:
        """Expected bytes that a pass over `tokens` tokens reads, each expert as likely as the others."""
        stored = self.bytes_by_kind
        del stored["embeddings"]  # one row per token is nothing
        return stored.total() * (1 - (1 - self.share_per_token) ** tokens)


def weight_tensors(
    model: PreTrainedModel, config: WeightConfig | None, held: Mapping[str, LinearSpec] | None = None
) -> Iterator[WeightTensor]:
    """List every parameter of `model` once, quantized as `config` says, or as the quantized layers are that it has.

    held: the specs of these layers, by name.
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
    seen: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                site = sites.get(id(parameter))
                counted = _tensor(model, module, parameter) if site is None else _linear(model, site, config)
                yield counted if site is None or not held else replace(counted, spec=held.get(site.name))


def _linear(model: PreTrainedModel, site: LinearSite, config: WeightConfig | None) -> WeightTensor:
    kept = config if config is None or not site.is_head else config.for_head
    if isinstance(site, ExpertsSite):
        return _experts(model, site, kept)
    return WeightTensor(
        kind="head" if site.is_head else "linears",
        shape=tuple(site.weight.shape),
        itemsize=site.weight.itemsize,
        spec=None if kept is None or site.skip is not None else LinearSpec.of(site.weight, kept),
        tied=site.is_tied,
    )


def _experts(model: PreTrainedModel, site: ExpertsSite, config: WeightConfig | None) -> WeightTensor:
    """The spec is that of the stored weight, [experts * out, in]."""
    weight, spec = site.matrices(site.parameter)[0], None
    group_size = None if config is None else config.layout.group_size
    fits = group_size is None or weight.shape[1] % group_size == 0
    if config is not None and fits and site.skip is None and not config.is_nf4:
        one = LinearSpec.of(weight, config)
        spec = replace(one, out_features=site.count * one.out_features)
    return WeightTensor(
        kind="experts", shape=tuple(site.weight.shape), itemsize=weight.itemsize, spec=spec,
        top_k=_experts_per_token(model),
    )  # fmt: skip


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
