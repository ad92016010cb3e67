"""From whatever the user has (a model, a config, a path) to a model whose shapes can be counted."""

from __future__ import annotations

import copy
import os
from typing import Any, cast

import torch
from torch import nn
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from ..errors import UnsupportedError
from ..model_config import read_config
from ..models import without_adapters
from .unpatched import is_ours, unpatched_shapes


def shapes_of(source: Any, *, dtype: torch.dtype | None) -> Any:
    """The model itself as it was before patch(), or one built from its config on meta: shapes without memory.

    dtype: of the built model; None takes the config's, else float32. Raises UnsupportedError for what is no decoder.
    """
    if isinstance(source, nn.Module):
        check_decoder(decoder_config(source))
        inner = without_adapters(source)
        if dtype not in (None, inner.dtype):
            raise UnsupportedError(
                f"dtype={dtype} is for a config or a path; the model given is counted in its own {inner.dtype}: leave "
                "dtype= out, or pass model.config"
            )
        return unpatched_shapes(inner) if is_ours(inner) else inner
    config = _load(source) if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedError(f"estimate() takes a config, a model or a path, not {type(source).__name__}")
    check_decoder(config)
    # A copy: building writes the attention implementation and the dtype into the config it is given.
    decoder = copy.deepcopy(config.get_text_config(decoder=True))
    try:
        with torch.device("meta"):
            return cast(Any, AutoModelForCausalLM).from_config(decoder, **({"dtype": dtype} if dtype else {}))
    except ValueError as error:
        raise UnsupportedError(f"{type(config).__name__} makes no causal language model: {error}") from error


def decoder_config(model: nn.Module) -> Any:
    """The config of the language model within `model`."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise UnsupportedError(f"{type(model).__name__} has no transformers config; pass a transformers model")
    return config.get_text_config(decoder=True)


def check_decoder(config: Any) -> None:
    """Raise UnsupportedError unless `config` describes a decoder that caches keys and values."""
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} describes an encoder-decoder; estimate() knows decoder-only models")
    # is_decoder alone says nothing: GPT-NeoX, which is never anything else, has it False.
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise UnsupportedError(f"{name} describes an encoder, which has no KV cache")
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedError(f"{name} has multi-head latent attention, whose cache estimate() does not know yet")
    if getattr(text, "v_head_dim", None) not in (None, getattr(text, "head_dim", None)):
        raise UnsupportedError(f"{name} has values of another size than keys, which estimate() does not know yet")
    if not isinstance(getattr(text, "num_attention_heads", None), int):
        raise UnsupportedError(f"{name} has no num_attention_heads, so it has no KV cache to estimate")


def _load(path: str | os.PathLike[str]) -> Any:
    try:
        return read_config(path)
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"no model config can be read from {os.fspath(path)!r}: {error}") from error
