"""A model whose shapes can be counted, made from what the user has: a model, a config or a path.

A patched model is counted as it was before; no weight is read back. What config.json must not say is found before
transformers makes anything of it.
"""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..cache.kinds.compressed_keys import RANK
from ..errors import HfAccelError, HfAccelWarning, UnsupportedError
from ..linear import LinearSpec, QuantModule
from ..linear.embedding import QuantEmbedding
from ..linear.hf import METHOD
from ..linear.layer_settings import spec_of
from ..models import layers_config, without_adapters
from ..patching.originals import check_inside, indexed
from ..patching.survey import sites_named
from ..patching.twin import twin
from ..patching.weight_sites import empty_original, quantized_layers
from ..undo.state import find_state

# Numbers of what transformers makes one after the other: a wrong one would keep it busy for days.
COUNTS = re.compile(r"(^|_)(layers?|blocks?|depths?|stages|experts)$")
MOST = 20_000  # Doge has 16,384 experts

DECODER_TOKENS = 4096  # of a decoder's sequence, where nobody says how many


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
    if is_encoder(config) or config.is_encoder_decoder:
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
    if has_both(config, model):
        return False
    # is_decoder alone is not enough: it is False in GPT-NeoX, which is always a decoder.
    if _fills_gaps(config):
        return True
    text = config.get_text_config(decoder=True)
    known = type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    return not known and (class_of(config) if model is None else model).can_generate() is False


def has_both(config: Any, model: Any = None) -> bool:
    """Return whether `config` describes an encoder with a decoder that generates from its output.

    model: the model that has this config, if there is one.
    """
    whole = config if model is None else model.config
    return bool(whole.is_encoder_decoder) and bool((class_of(whole) if model is None else model).can_generate())


def _fills_gaps(config: Any) -> bool:
    """Return whether `config` is of a model that sees the tokens on both sides, as BERT, unless it says otherwise."""
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)


def check_known(config: Any, model: Any = None) -> None:
    """Raise UnsupportedError unless `config` describes a decoder that caches keys and values, an encoder, or both."""
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False) and not has_both(config, model):
        raise UnsupportedError(
            f"{name} describes an encoder-decoder without a head; give the class that generates under architectures"
        )
    text = config.get_text_config(decoder=True)
    if text is not config and is_encoder(config, model):
        raise UnsupportedError(f"{name} describes a model of several parts; estimate() knows those of one")
    if getattr(text, "index_topk", None):
        raise UnsupportedError(f"{name} has attention over chosen keys, whose indices estimate() does not know yet")
    if not getattr(text, RANK, None) and getattr(text, "v_head_dim", None) not in (
        None,
        getattr(text, "head_dim", None),
    ):
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
    if config.is_encoder_decoder:
        mappings = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, *mappings)
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


# -- encoders with a decoder ----------------------------------------------------------------------------

# How models call the attention of a decoder's layer to an encoder's output, and its projections to keys and values.
CROSSING = frozenset({"encoder_attn", "EncDecAttention", "cross_attn", "cross_attention", "crossattention"})
OF_KEYS = frozenset({"k", "v", "key", "value", "k_proj", "v_proj", "key_proj", "value_proj"})


def source_modules(model: PreTrainedModel) -> set[nn.Module]:
    """Return the modules that an encoder-decoder runs once for each source: an encoder's, and the projections of its
    output to keys and values.
    """
    if not has_both(model.config, model):
        return set()
    found = set(model.get_encoder().modules())
    for name, module in model.named_modules():
        above, _, last = name.rpartition(".")
        around = above.rpartition(".")[2]
        if around in CROSSING and last in OF_KEYS:
            found.add(module)
    return found - set(_embeddings(model))


def _embeddings(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the tables of words, which an encoder shares with its decoder."""
    return (module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None)


# -- checkpoints that are quantized already, by their config.json; no file of weights is read -------------


def stored_config(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the quantization_config of a checkpoint's config, also where only its text model has one."""
    for one in (config, layers_config(config)):
        found = getattr(one, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())
    return None


def stored_specs(config: PreTrainedConfig, shapes: Any) -> tuple[dict[str, LinearSpec], frozenset[str]]:
    """Return how each layer of a checkpoint of ours is stored, by its name, and the embeddings that look rows up in
    one of them.

    shapes: the model of this config. Warns where the checkpoint of another program is counted in floating point.
    """
    stored = stored_config(config)
    if stored is None:
        return {}, frozenset()
    is_ours, listed = stored.get("quant_method") == METHOD, stored.get("modules") or {}
    sites = sites_named(shapes, listed) if is_ours else {}
    if not is_ours or len(sites) < len(listed):
        warnings.warn(
            f"the checkpoint is quantized by {stored.get('quant_method')}, in a form that estimate() counts as "
            "floating point; load it, and estimate the model",
            HfAccelWarning,
            stacklevel=4,
        )
        return {}, frozenset()
    specs = {name: site.whole(spec_of(listed[name], site.matrices(site.parameter)[0])) for name, site in sites.items()}
    return specs, frozenset(stored.get("tables") or ())


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
        if name.rpartition(".")[0] in layers:  # the layer in a convolution, which is put back as a whole
            continue
        there = copied.get_submodule(name)
        freed = [p for p in there._parameters.values() if p is not None and p.numel() == 0]
        if there is layer or freed:
            copied.set_submodule(name, empty_original(layer))
    for name, head in ((n, m.head) for n, m in layers.items() if isinstance(m, QuantEmbedding)):
        tied = next((own for own, other in layers.items() if other is head), None)
        if tied is not None:  # to the Linear that was put back
            copied.get_submodule(name)._parameters["weight"] = copied.get_submodule(tied).weight
    return copied


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
