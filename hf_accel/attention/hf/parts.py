"""The parts of a model that keep their own attention: mostly towers for images or sound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...models import is_within, layers_config
from ...recognition.module_code import code_of
from .forward import ATTENTION_NAME


def stock_implementation(model: PreTrainedModel, module: nn.Module) -> str:
    """Return the attention implementation that a module of the model has without us."""
    return implementation_of_config(model, getattr(module, "config", model.config))


def implementation_of_config(model: PreTrainedModel, config: Any) -> str:
    """Return the attention implementation that a part of the model with this config has without us."""
    name = getattr(config, "_attn_implementation", None) or model.config._attn_implementation
    if name != ATTENTION_NAME:
        return str(name)
    part = next((m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is config), model)
    return "sdpa" if part._supports_sdpa else "eager"  # it was loaded with our attention


def attention_refusals(model: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, str, str]]:
    """Return the innermost model around each module whose attention cannot be ours, its name, and the reason as a
    clause.
    """
    models = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    for name, module in model.named_modules():
        refusal = code_of(module).refusal
        if refusal is not None:
            around = max((outer for outer in models if is_within(name, outer)), key=len)
            yield models[around], around, refusal


def stock_parts(model: PreTrainedModel) -> dict[str, str]:
    """Return the parts that keep their own attention, by name, each with the reason, as one clause.

    Such a part has a config of its own, in which transformers looks up the attention and the masks of that part
    alone. It cannot be one that the decoder is in.
    """
    decoder = {id(model.config), id(layers_config(model.config))}
    parts: dict[str, str] = {}
    for part, name, refusal in attention_refusals(model):
        if not any(id(getattr(module, "config", None)) in decoder for module in part.modules()):
            parts.setdefault(name, refusal)
    return parts


def modules_outside(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the model's modules by name, except for those in parts that keep their own attention."""
    parts = stock_parts(model)
    for name, module in model.named_modules():
        if not any(is_within(name, part) for part in parts):
            yield name, module


def set_our_attention(model: PreTrainedModel, set_implementation: Callable[[str], None]) -> None:
    """Set our attention through transformers' own method, except in the parts that keep theirs."""
    inside = [module for name in stock_parts(model) for module in model.get_submodule(name).modules()]
    kept = [(m.config, stock_implementation(model, m)) for m in inside if isinstance(m, PreTrainedModel)]
    set_implementation(ATTENTION_NAME)
    for config, name in kept:
        config._attn_implementation_internal = name
