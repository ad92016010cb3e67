"""Sizes of a decoder layer that is still to be patched: of its hidden states, and of what it rotates of a head."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...attention import AttentionSpec
from ...attention.hf.latents import is_known_expansion
from ...models import layers_config
from ...recognition.expanded_keys import ROTATED
from ...recognition.operation import UntraceableError


def refuse_partial_rotation(config: Any) -> None:
    """Raise UntraceableError if the rotation leaves some numbers of a head as they are."""
    if rotated_share(config) != 1.0:
        raise UntraceableError("its rotation leaves numbers as they are")


def rotated_share(config: Any, kind: str | None = None) -> float:
    """Return the share of a head's numbers that are rotated. Raises UntraceableError if it depends on the layer.

    kind: what the config calls the layer, by which it may have settings.
    """
    parameters = getattr(layers_config(config), "rope_parameters", None) or {}
    if isinstance(parameters.get(kind), dict):
        parameters = parameters[kind]
    for each in parameters.values():
        if isinstance(each, dict) and each.get("partial_rotary_factor", 1.0) != 1.0:
            raise UntraceableError("its layers rotate different numbers of a head")
    if parameters.get("rope_type") == "proportional":  # all of a head have cos and sin, of which some are 1 and 0
        return 1.0
    return float(parameters.get("partial_rotary_factor", 1.0))


def rotated_size(config: Any, module: nn.Module, spec: AttentionSpec) -> int:
    """Return how many numbers of a head are rotated."""
    if is_known_expansion(module):  # in Mistral 4 the share is that of a whole head, of which one part is rotated
        return int(vars(module)[ROTATED])
    kinds, index = getattr(layers_config(config), "layer_types", None) or (), vars(module).get("layer_idx")
    kind = kinds[index] if type(index) is int and index < len(kinds) else None
    return int(rotated_share(config, kind) * spec.head_dim)


def called_parts(layer: nn.Module) -> list[nn.Module]:
    """Return the modules that a layer calls: its own, and those of the parts in a list of its own, as T5's have.

    The parts of a list are of different classes; else they are layers themselves.
    """
    found = list(layer.children())
    for each in layer.children():
        parts = list(each) if isinstance(each, nn.ModuleList) else []
        if len(parts) > 1 and len({type(part) for part in parts}) == len(parts):
            found += [module for part in parts for module in part.children()]
    return found


def layer_width(layer: nn.Module, config: Any) -> int:
    """Return the size of a layer's hidden states, which is that of its first norm, or of its config if its norms have
    no weights.
    """
    for module in called_parts(layer):
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 1:
            return int(weight.shape[0])
    width = getattr(layers_config(config), "hidden_size", None)
    if type(width) is not int:
        raise UntraceableError("it has no norm")
    return width
