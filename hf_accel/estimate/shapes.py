"""A model whose shapes can be counted, made from what the user has: a model, a config or a path.

A patched model is counted as it was before; no weight is read back. What config.json must not say is found before
transformers makes anything of it.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..errors import HfAccelError, UnsupportedError
from ..linear import LinearSpec, QuantExperts, QuantModule
from ..linear.embedding import QuantEmbedding
from ..models import without_adapters
from ..patching.originals import check_inside, indexed
from ..patching.twin import quantized_layers, twin
from ..undo.state import find_state

# Numbers of what transformers makes one after the other: a wrong one would keep it busy for days.
COUNTS = re.compile(r"(^|_)(layers?|blocks?|depths?|stages|experts)$")
MOST = 20_000  # Doge has 16,384 experts


def shapes_of(source: Any, *, dtype: torch.dtype | None) -> Any:
    """Return the model as it was before patch(), or one built from its config on meta: shapes without memory.

    dtype: of the built model; None takes the config's, else float32. Raises UnsupportedError for other
    models than decoders and encoders.
    """
    if isinstance(source, nn.Module):
        inner = without_adapters(source)
        decoder_config(inner)
        check_known(inner.config, inner)
        if dtype not in (None, inner.dtype):
            raise UnsupportedError(
                f"dtype={dtype} is for a config or a path; the model given is counted in its own {inner.dtype}: leave "
                "dtype= out, or pass model.config"
            )
        was_patched = find_state(inner) is not None or any(isinstance(m, QuantModule) for m in inner.modules())
        return unpatched_shapes(inner) if was_patched else inner
    config = load_config(source) if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedError(f"estimate() takes a config, a model or a path, not {type(source).__name__}")
    check_known(config)
    if is_encoder(config):
        return on_meta(config, dtype=dtype)
    # A copy: building writes the attention implementation and the dtype into the config it is given.
    decoder = copy.deepcopy(config.get_text_config(decoder=True))
    try:
        with torch.device("meta"):
            return cast(Any, AutoModelForCausalLM).from_config(decoder, **({"dtype": dtype} if dtype else {}))
    except ValueError as error:
        raise UnsupportedError(f"{type(config).__name__} makes no causal language model: {error}") from error


def decoder_config(model: nn.Module) -> Any:
    """Return the config of the language model within `model`."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise UnsupportedError(f"{type(model).__name__} has no transformers config; pass a transformers model")
    return config.get_text_config(decoder=True)


def is_encoder(config: Any, model: Any = None) -> bool:
    """Return whether `config` describes a model that has passes over whole sequences, and no decoder's KV cache.

    model: the model that has this config, if there is one.
    """
    # is_decoder alone is not enough: it is False in GPT-NeoX, which is always a decoder.
    if _fills_gaps(config):
        return True
    text = config.get_text_config(decoder=True)
    known = type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    return not known and (class_of(config) if model is None else model).can_generate() is False


def _fills_gaps(config: Any) -> bool:
    """Return whether `config` is of a model that sees the tokens on both sides, as BERT, unless it says otherwise."""
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)


def check_known(config: Any, model: Any = None) -> None:
    """Raise UnsupportedError unless `config` describes a decoder that caches keys and values, or an encoder."""
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} describes an encoder-decoder; estimate() knows decoders and encoders")
    text = config.get_text_config(decoder=True)
    if text is not config and is_encoder(config, model):
        raise UnsupportedError(f"{name} describes a model of several parts; estimate() knows those of one")
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedError(f"{name} has multi-head latent attention, whose cache estimate() does not know yet")
    if getattr(text, "v_head_dim", None) not in (None, getattr(text, "head_dim", None)):
        raise UnsupportedError(f"{name} has values of another size than keys, which estimate() does not know yet")
    if not isinstance(getattr(text, "num_attention_heads", None), int):
        raise UnsupportedError(f"{name} has no num_attention_heads, by which estimate() counts attention")


def class_of(config: PreTrainedConfig) -> Any:
    """Return the class that config.json names under architectures, else that of causal models, or the base model's.

    For code that comes with the checkpoint, and for what transformers does not know, an auto class.
    """
    if getattr(config, "auto_map", None):
        return AutoModelForCausalLM
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    mappings = (MODEL_MAPPING,) if _fills_gaps(config) else (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)
    known: Any = next((m for m in mappings if type(config) in m), {})
    return known.get(type(config), AutoModelForCausalLM)


def on_meta(config: PreTrainedConfig, *, dtype: Any) -> Any:
    """Build the model of class_of(config) without memory. dtype: None takes the config's, else float32."""
    kind, own = class_of(config), copy.deepcopy(config)  # building writes into the config it is given
    build = kind._from_config if issubclass(kind, PreTrainedModel) else kind.from_config
    with torch.device("meta"):
        return build(own, **({"dtype": dtype} if dtype else {}))


def load_config(path: str | os.PathLike[str]) -> Any:
    """Read the config of a checkpoint. Raises UnsupportedError if there is none."""
    try:
        return read_config(path)
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"no model config can be read from {os.fspath(path)!r}: {error}") from error


def read_config(path: str | os.PathLike[str], **hub: Any) -> PreTrainedConfig:
    """Read the config of a checkpoint. hub: keywords of from_pretrained.

    Raises HfAccelError for numbers of layers that no model has, and for shards that lie outside of the folder.
    """
    if Path(path).is_dir():
        for index in Path(path, hub.get("subfolder") or "").glob("*.index*.json"):
            indexed(index)
    content, _ = PreTrainedConfig.get_config_dict(path, **hub)
    for name, value in _numbers(content):
        if COUNTS.search(name.rpartition(".")[2]) and value > MOST:
            raise HfAccelError(
                f"config.json of {os.fspath(path)!r} says {name}={value}, and no model has more than {MOST:,}; copy "
                "the checkpoint again"
            )
    if content.get("transformers_weights") is not None:
        check_inside(content["transformers_weights"], "transformers_weights in config.json")
    config: PreTrainedConfig = AutoConfig.from_pretrained(path, **hub)
    return config


def _numbers(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield all numbers in a config, by their names."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", value


# -- patched models ------------------------------------------------------------------------------------


def unpatched_shapes(model: Any) -> Any:
    """Copy the model over the same storage, with a Linear instead of each of our layers, and embeddings of floats.

    Weights that the patch freed, or that were never loaded, are on meta.
    """
    copied: Any = twin(model)
    layers = quantized_layers(copied)
    state = find_state(copied)
    if state is not None:
        state.journal.undo()
    for name, layer in layers.items():
        there = copied.get_submodule(name)
        if isinstance(layer, QuantExperts):
            _put_experts(copied, name, there, layer)
        elif not isinstance(layer, QuantEmbedding) and (there is layer or there.weight.numel() == 0):
            copied.set_submodule(name, _linear(layer))
    for name, layer in layers.items():
        if isinstance(layer, QuantEmbedding):
            _put_embedding(copied, name, layer, layers)
    return copied


def _put_embedding(model: Any, name: str, layer: QuantEmbedding, layers: Mapping[str, Any]) -> None:
    """Put back an embedding of the original class. The weight of a tied head is that of the Linear put back for it."""
    there = model.get_submodule(name)
    if there is layer:
        there = layer.as_float(device="meta")
        model.set_submodule(name, there)
    head = next((own for own, other in layers.items() if other is layer.head), None)
    if head is not None:
        there._parameters["weight"] = model.get_submodule(head).weight
    elif there.weight.numel() == 0:
        there._parameters["weight"] = layer.as_float(device="meta").weight


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
