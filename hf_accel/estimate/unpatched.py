"""A patched model as it was before, for its shapes: no weight is read back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..linear import QuantLinear
from ..state import find_state
from ..twin import twin


def is_ours(model: nn.Module) -> bool:
    """Whether patch() was at work on the model, or on what it was loaded from."""
    return find_state(model) is not None or any(isinstance(module, QuantLinear) for module in model.modules())


def unpatched_shapes(model: Any) -> Any:
    """A copy over the same storage, with a Linear in the place of each of our layers.

    Weights that the patch freed, or that never were there, stand on meta.
    """
    copied: Any = twin(model)
    state = find_state(copied)
    if state is not None:
        for write in state.journal.writes:
            if isinstance(write.new, QuantLinear):
                _with_shape(write.old, write.new)
        state.journal.undo()
    for name, layer in list(copied.named_modules()):
        if isinstance(layer, QuantLinear):
            copied.set_submodule(name, _linear(layer))
    return copied


def _with_shape(original: nn.Linear | Conv1D, layer: QuantLinear) -> None:
    if original.weight.numel() == 0:
        rows, columns = layer.out_features, layer.in_features
        shape = (columns, rows) if isinstance(original, Conv1D) else (rows, columns)
        original.weight = nn.Parameter(torch.empty(shape, dtype=layer.compute_dtype, device="meta"))


def _linear(layer: QuantLinear) -> nn.Linear:
    return nn.Linear(
        layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=layer.compute_dtype, device="meta"
    )


def settings_of(model: nn.Module) -> tuple[Any, str | None]:
    """weights and kv_dtype as estimate() takes them: those that the model was patched with, else None."""
    state = find_state(model)
    if state is None:
        return None, None
    cache = state.generation.cache
    return state.config.weights, None if cache is None else cache.dtype
