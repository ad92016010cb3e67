"""The facts about a model that llama.cpp needs besides its weights: names, hyperparameters, the order of rotated rows.

Source: docs/gguf.md of ggml, and convert_hf_to_gguf.py of llama.cpp.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...errors import UnsupportedError
from ...models import head_dim


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's name of a model type. neighbours: it rotates neighbouring outputs of a head there."""

    name: str
    neighbours: bool


ARCHITECTURES = {
    "llama": Architecture("LLAMA", neighbours=True),
    "mistral": Architecture("LLAMA", neighbours=True),
    "qwen2": Architecture("QWEN2", neighbours=False),
    "qwen3": Architecture("QWEN3", neighbours=False),
}
SCALED = ("linear", "llama3")  # rotary embeddings whose frequencies are divided by constants


def gguf_refusal(config: PreTrainedConfig) -> str | None:
    """Return why a model of this config is not written as GGUF, as one clause, or None."""
    settings: Any = config
    if config.model_type not in ARCHITECTURES:
        return f"only {', '.join(ARCHITECTURES)} models are written as GGUF here, this is {config.model_type!r}"
    rotary = settings.rope_parameters
    kind = rotary.get("rope_type", "default")
    if kind != "default" and kind not in SCALED:
        return f"rotary embeddings of type {kind!r} are not written as GGUF here"
    if rotary.get("partial_rotary_factor", 1) != 1:
        return "rotary embeddings of a part of a head are not written as GGUF here"
    if settings.hidden_act != "silu":
        return f"llama.cpp computes silu in a {config.model_type} model, this has {settings.hidden_act!r}"
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if windows or (config.model_type == "mistral" and getattr(config, "sliding_window", None)):
        return "attention within a window is not written as GGUF here"
    return None


def check_gguf(model: PreTrainedModel) -> Architecture:
    """Raises UnsupportedError for a model that is not written as GGUF, and where the package gguf is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedError("writing GGUF takes the package gguf; install it with `pip install hf_accel[gguf]`")
    refusal = gguf_refusal(model.config)
    if refusal is None and not type(model).__name__.endswith("ForCausalLM"):
        refusal = f"llama.cpp takes models with a language model's head, this is {type(model).__name__}"
    if refusal is not None:
        raise UnsupportedError(f"{refusal}; use save_compressed or save_pretrained")
    return ARCHITECTURES[model.config.model_type]


def write_settings(writer: Any, config: Any) -> None:
    """Write the hyperparameters of a model."""
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def frequency_factors(config: Any) -> Tensor | None:
    """Return the divisors of llama.cpp's rotary frequencies, float32 [head_dim / 2]; None if all are 1."""
    kind = config.rope_parameters.get("rope_type", "default")
    if kind == "default":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    exponents = torch.arange(0, head_dim(config), 2, dtype=torch.float32) / head_dim(config)
    plain = 1.0 / config.rope_parameters["rope_theta"] ** exponents
    return plain / scaled


def rotated_rows(name: str, config: Any) -> Tensor | None:
    """Return the order of the outputs of q_proj and k_proj where llama.cpp rotates neighbours, int64 [out]; else None.

    transformers rotates outputs half a head apart: the first of each pair are in a head's first half.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or not ARCHITECTURES[config.model_type].neighbours:
        return None
    size = head_dim(config)
    return torch.arange(heads * size).view(heads, 2, size // 2).transpose(1, 2).flatten()
