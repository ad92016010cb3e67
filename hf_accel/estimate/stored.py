"""The layers that a checkpoint holds quantized, as its config.json says; no file of weights is read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..errors import HfAccelWarning
from ..linear import LinearSpec
from ..linear.embedding import TABLE
from ..linear.hf import METHOD
from ..linear.layer_settings import spec_of
from ..models import layers_config


def stored_config(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the quantization_config of a checkpoint's config, also where only its text model has one."""
    for one in (config, layers_config(config)):
        found = getattr(one, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())
    return None


def stored_specs(config: PreTrainedConfig, shapes: nn.Module) -> tuple[dict[str, LinearSpec], frozenset[str]]:
    """Return how each layer of a checkpoint of ours is stored, by its name, and the embeddings that look rows up in
    one of them.

    shapes: the model of this config. Warns where the checkpoint of another program is counted in floating point.
    """
    stored = stored_config(config)
    if stored is None:
        return {}, frozenset()
    modules = dict(shapes.named_modules())
    modules |= {f"{name}.{TABLE}": module for name, module in modules.items() if isinstance(module, nn.Embedding)}
    listed = stored.get("modules") or {}
    if stored.get("quant_method") != METHOD or not all(_is_linear(modules.get(name)) for name in listed):
        warnings.warn(
            f"the checkpoint is quantized by {stored.get('quant_method')}, in a form that estimate() counts as "
            "floating point; load it, and estimate the model",
            HfAccelWarning,
            stacklevel=4,
        )
        return {}, frozenset()
    specs = {name: spec_of(settings, modules[name].weight) for name, settings in listed.items()}
    return specs, frozenset(stored.get("tables") or ())


def _is_linear(module: nn.Module | None) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.ndim == 2
