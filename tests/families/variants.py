"""Other configurations of a family, drawn at random: heads, ratios, windows, kinds of layers and of rotations."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from transformers import PreTrainedConfig

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
ROTATIONS: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)  # fmt: skip


def variation(kind: type[PreTrainedConfig], seed: int) -> dict[str, Any]:
    """Values for some fields of a config class, which fit each other; the same seed draws the same."""
    draw = random.Random(f"{kind.__name__} {seed}")
    heads = draw.choice((2, 3, 4, 6, 8))
    head_dim = draw.choice((8, 16, 24, 32))
    ratio = draw.choice([n for n in (1, 2, 3, 4) if heads % n == 0])
    count = draw.choice((1, 2, 3, 4))
    # Windows are of two tokens at least: for one, transformers' own cache keeps all tokens.
    values: dict[str, Any] = {
        "num_attention_heads": heads, "n_head": heads, "num_key_value_heads": heads // ratio, "head_dim": head_dim,
        "hidden_size": heads * head_dim, "n_embd": heads * head_dim, "intermediate_size": draw.choice((40, 64, 100)),
        "num_hidden_layers": count, "n_layer": count, "sliding_window": draw.choice((2, 3, 5, 7, 12, 30)),
        "use_sliding_window": draw.random() < 0.5, "max_window_layers": draw.randrange(count + 1),
        "tie_word_embeddings": draw.random() < 0.5, "attention_bias": draw.random() < 0.5,
        "mlp_bias": draw.random() < 0.5, "hidden_act": draw.choice(ACTIVATIONS),
        "hidden_activation": draw.choice(ACTIVATIONS), "query_pre_attn_scalar": draw.choice((8, 16, 50)),
        "rms_norm_eps": draw.choice((1e-6, 1e-3)), "layer_norm_eps": draw.choice((1e-6, 1e-3)),
        "final_logit_softcapping": draw.choice((None, 5.0)),
    }  # fmt: skip
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in values.items() if name in names}
    return values | _layers(kind, count, draw) | _rotation(kind, draw)


def _layers(kind: type[PreTrainedConfig], count: int, draw: random.Random) -> dict[str, Any]:
    """Layers of the kinds that the family has by default, in any mix."""
    try:
        kinds = sorted(set(getattr(kind(), "layer_types", None) or ()))
    except Exception:  # composite configs want their parts
        return {}
    return {"layer_types": [draw.choice(kinds) for _ in range(count)]} if kinds else {}


def _rotation(kind: type[PreTrainedConfig], draw: random.Random) -> dict[str, Any]:
    """One of transformers' rotations, where a config has one for all of its layers."""
    try:
        parameters = getattr(kind(), "rope_parameters", None)
    except Exception:
        return {}
    if not isinstance(parameters, dict) or "rope_theta" not in parameters or "mrope_section" in parameters:
        return {}
    kept = {name: parameters[name] for name in ("partial_rotary_factor",) if name in parameters}
    return {"rope_parameters": draw.choice(ROTATIONS) | kept | {"rope_theta": draw.choice((100.0, 1e4))}}
