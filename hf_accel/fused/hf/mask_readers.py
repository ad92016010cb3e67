"""Modules that read masks of attention without attending, as the routers of NLLB-MoE do, in models whose own attention
is transformers' eager one. They get the masks of eager attention: numbers that are added to scores.

Our masks are those of sdpa, which say of each key whether it is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...attention.hf.mask import MASK_DIMENSIONS, numbers_of
from ...attention.hf.stock import EAGER, stock_implementation
from ...recognition.cache_code import CACHE_NAMES
from ...recognition.call_form import parameter_names
from ...recognition.code import code_of
from ...undo.journal import Mixin, mixed_class, original_class
from ..site import FusedSite, SiteKind

MASK_READERS = SiteKind("mask readers", "modules that read masks", "as eager attention has them", "by their code")


class EagerMasks(Mixin):
    """A mixin for a module that reads masks: it gets those of eager attention."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        values = (*args, *kwargs.values())
        dtype = next(each.dtype for each in values if isinstance(each, Tensor) and each.is_floating_point())
        named = {name: _as_eager(value, dtype) for name, value in kwargs.items()}
        return super().forward(*(_as_eager(value, dtype) for value in args), **named)  # type: ignore[misc]


def _as_eager(value: Any, dtype: torch.dtype) -> Any:
    """Return a mask [B, 1, Q, T] of bool as numbers that hide where it is False; any other value unchanged."""
    if not isinstance(value, Tensor) or value.dtype is not torch.bool or value.ndim != MASK_DIMENSIONS:
        return value
    seen = numbers_of(value)
    assert seen is not None
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def mask_readers(model: PreTrainedModel) -> Iterator[FusedSite]:
    """Find the outermost modules that read masks of attention and do not attend, in layers that do, where attention is
    eager.
    """
    if stock_implementation(model, model) != EAGER:
        return
    for name, layers in model.named_modules():
        for number, layer in enumerate(layers if isinstance(layers, nn.ModuleList) else ()):
            if any(code_of(part).attends for part in layer.modules()):
                found = _outermost(layer, f"{name}.{number}")
                yield from (FusedSite(own, module, MASK_READERS, EagerMasks, None) for own, module in found)


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        own = f"{name}.{key}"
        yield from [(own, child)] if _reads_masks(child) else _outermost(child, own)


def _reads_masks(module: nn.Module) -> bool:
    names = parameter_names(original_class(module).forward)
    if CACHE_NAMES & {*names} or not any("mask" in each for each in names[1:]):
        return False
    codes = map(code_of, module.modules())
    return not any(code.attends or code.refusal is not None or code.caches for code in codes)


def give_eager_masks(model: PreTrainedModel, tried: nn.Module) -> None:
    """Let the modules of a small copy of a model that read masks get those that the model's own would get."""
    parts = dict(tried.named_modules())
    for site in mask_readers(model):
        if site.name in parts:
            parts[site.name].__class__ = mixed_class(EagerMasks, original_class(parts[site.name]))
