"""A patched model as it was before, for its shapes: no weight is read back."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..linear import LinearSpec, QuantExperts, QuantLinear, QuantModule
from ..linear.nf4 import is_nf4
from ..models import without_adapters
from ..patching.twin import twin
from ..undo.state import find_state


def was_patched(model: nn.Module) -> bool:
    """Return whether patch() was at work on the model, or on what it was loaded from."""
    return find_state(model) is not None or any(isinstance(module, QuantModule) for module in model.modules())


def unpatched_shapes(model: Any) -> Any:
    """Copy the model over the same storage, with a Linear instead of each of our layers.

    Weights that the patch freed, or that were never loaded, are on meta.
    """
    copied: Any = twin(model)
    layers: dict[str, Any] = {
        name: module
        for name, module in copied.named_modules()
        if isinstance(module, QuantLinear | QuantExperts) or is_nf4(module)
    }
    state = find_state(copied)
    if state is not None:
        state.journal.undo()
    for name, layer in layers.items():
        there = copied.get_submodule(name)
        if isinstance(layer, QuantExperts):
            _put_experts(copied, name, there, layer)
        elif there is layer or there.weight.numel() == 0:
            copied.set_submodule(name, _linear(layer))
    return copied


def _put_experts(model: Any, name: str, there: Any, layer: QuantExperts) -> None:
    """Put back experts of the original class, with weights on meta if theirs were freed."""
    on_meta = layer.original(device="meta")
    if there is layer:
        model.set_submodule(name, on_meta)
        return
    for key in layer.weights:
        if there._parameters[key].numel() == 0:
            there._parameters[key] = on_meta._parameters[key]


def _linear(layer: Any) -> nn.Linear:
    return nn.Linear(
        layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=layer.compute_dtype, device="meta"
    )


def held_specs(model: nn.Module) -> dict[str, LinearSpec]:
    """Return how each quantized layer of ours is held, by its name."""
    inner = without_adapters(model)
    return {name: module.spec for name, module in inner.named_modules() if isinstance(module, QuantModule)}


def patched_settings(model: nn.Module) -> tuple[Any, str | None]:
    """Return weights and kv_dtype as estimate() takes them: those that the model was patched with, else None."""
    state = find_state(model)
    if state is None:
        return None, None
    cache = state.generation.cache
    return state.config.weights, None if cache is None else cache.dtype
