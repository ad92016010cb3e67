"""The references that verify() compares a model with."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention.hf import ATTENTION_NAME
from ..config import CacheConfig
from ..linear import QuantModule
from ..linear.nf4 import is_nf4
from ..models import layers_config
from ..patching.attention_survey import attention_sites
from ..patching.check import check_model
from ..patching.patch import is_patched, patch
from ..patching.twin import twin
from ..patching.weight_sites import quantized_layers
from ..undo.state import state_of

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


def kv_config(model: PreTrainedModel) -> CacheConfig | None:
    """Return the cache's config of a patched model whose keys and values are quantized."""
    settings = state_of(check_model(model)).generation.cache if is_patched(model) else None
    return None if settings is None or settings.dtype == "auto" else settings


def is_quantized(model: PreTrainedModel) -> bool:
    """Return whether weights, or keys and values, are."""
    return kv_config(model) is not None or bool(quantized_layers(model))


def quantized_reference(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model with the same quantized weights in plain torch: reference linears and attention, stock's modules,
    loop and cache. The paged cache stays only if keys and values are quantized, since the cache quantizes them. Takes
    one copy of the quantized weights, in the form in which they are stored.
    """
    reference = twin(model)
    inner = check_model(reference)
    layers = quantized_layers(inner)
    attention = layers_config(inner.config)._attn_implementation
    cache = kv_config(model)
    state_of(inner).journal.undo()  # puts the float Linears back, whose weights may be gone
    for name, layer in layers.items():
        for held in layer.modules():
            if isinstance(held, QuantModule):
                _in_plain_torch(held)
        inner.set_submodule(name, layer)
    own_attention = attention == ATTENTION_NAME and attention_sites(inner, quantized_kv=False)
    return patch(reference, weights=None, attention="reference" if own_attention else None, cache=cache, fuse=False)


def _in_plain_torch(layer: QuantModule) -> None:
    """Let the layer use the reference backend, which rounds activations as the layer's own backend does."""
    assert layer.choice is not None
    layer.activations = layer.choice.backend.activations
    layer.requested_backend = layer.choice.backend.reference
    layer.unpack().pack()


def widened(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the model in the next wider dtype; quantized weights share the same integers."""
    wide = twin(model)
    nn.Module.to(wide, WIDER[model.dtype])  # transformers' own refuses for quantized models
    for layer in filter(is_nf4, wide.modules()):
        setattr(layer, "compute_dtype", WIDER[model.dtype])  # noqa: B010 - bitsandbytes has no types
    return wide
