"""Other configurations of a family, drawn at random: heads, ratios, windows, kinds of layers and of rotations.

Each config of a model is drawn, its parts too. What a drawn config does not fit is drawn again (see models.py).
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from transformers import PreTrainedConfig

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
ODDS = (131, 137, 149, 160)  # sizes of a vocabulary; the ids of prompts and images are below the smallest
WIDTHS = (40, 64, 72, 100)  # of feed-forwards: multiples of 4, as transformers' own code asks here and there
DTYPES = (torch.float16, *[torch.float32] * 3, torch.bfloat16, *[torch.float32] * 3)  # by the number of a variant
SMALL_ROTATION = 16  # positions for which a rotation was trained
LONG_ONLY = ("Phi3Config", "Phi4MultimodalConfig")  # which take this rotation, and the usual one
Draw = random.Random

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": SMALL_ROTATION}
ROTATIONS: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    YARN,
    YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.8},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": SMALL_ROTATION,
    },
)  # fmt: skip
# Of which the length of the batch makes another: seldom, as transformers' own loop runs them.
CHANGING: tuple[dict[str, Any], ...] = (
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": SMALL_ROTATION},
)

# Fields that fit whatever stands beside them.
FREE: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        "attention_bias", "mlp_bias", "use_bias", "bias", "qkv_bias", "o_bias", "use_qkv_bias", "use_sliding_window",
        "tie_word_embeddings", "use_qk_norm", "qk_layernorm", "norm_topk_prob", "scale_embedding", "conv_bias",
        "use_conv_bias", "mamba_conv_bias", "mamba_proj_bias", "rope_interleave", "use_parallel_residual",
        "parallel_attn", "alibi", "mamba_rms_norm", "mamba_norm_before_gate", "add_out_norm",
        "scale_attn_by_inverse_layer_idx", "altup_correct_scale", "truncate", "attention_out_bias",
    ),
    (False, True),
) | dict.fromkeys(
    ("hidden_act", "hidden_activation", "activation_function"), ACTIVATIONS
) | dict.fromkeys(
    (
        "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "moe_intermediate_size",
        "shared_intermediate_size", "shared_expert_intermediate_size",
    ),
    WIDTHS,
) | dict.fromkeys(
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), (1e-6, 1e-3)
) | dict.fromkeys(
    ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim", "conv_L_cache"), (2, 3, 4)
) | dict.fromkeys(
    ("mamba_d_state", "state_size"), (4, 8, 20)
) | dict.fromkeys(
    ("chunk_size", "mamba_chunk_size"), (4, 7, 16)
) | dict.fromkeys(
    ("n_groups", "mamba_n_groups"), (1, 2)
) | dict.fromkeys(
    ("final_logit_softcapping", "attn_logit_softcapping"), (None, 2.0, 5.0)
) | dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "logits_scaling", "routed_scaling_factor", "key_multiplier",
     "attention_out_multiplier", "attention_in_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
     "lm_head_multiplier"),
    (1.0, 0.5, 1.7),
) | {
    # Windows are of two tokens at least: for one, transformers' own cache keeps all tokens.
    "sliding_window": (2, 3, 5, 7, 12, 30), "query_pre_attn_scalar": (8, 16, 50), "attention_multiplier": (0.1, 0.25),
    "num_experts_per_tok": (1, 2, 3), "first_k_dense_replace": (0, 1, 2), "q_lora_rank": (None, 24, 32),
    "kv_lora_rank": (16, 24, 40), "qk_rope_head_dim": (4, 8, 16), "qk_nope_head_dim": (8, 16, 24),
    "v_head_dim": (8, 16, 24), "linear_key_head_dim": (8, 16, 24), "linear_value_head_dim": (8, 16, 32),
    "linear_num_key_heads": (1, 2), "linear_num_value_heads": (2, 4), "feed_forward_proj": ("relu", "gated-gelu"),
    "relative_attention_max_distance": (8, 16, 40), "relative_attention_num_buckets": (4, 8, 12),
    "clip_qkv": (None, 1.0), "num_kv_shared_layers": (0, 1, 2),
    "swiglu_limit": (1.0, 7.0), "logit_scale": (0.0625, 1.0), "d_kv": (8, 16, 24), "attention_chunk_size": (4, 7, 32),
    "qk_dim_factor": (0.5, 1.0), "gate_soft_cap": (5.0, 15.0), "output_logit_soft_cap": (5.0, 30.0),
    "rescale_every": (0, 1, 6), "router_bias": (False, True), "time_step_limit": ((0.0, float("inf")), (0.01, 0.1)),
    "no_rope_layer_interval": (1, 2),
}  # fmt: skip


def variation(kind: type[PreTrainedConfig], seed: int, small: dict[str, Any], *, is_part: bool) -> dict[str, Any]:
    """Values for some fields of a config class, which fit each other; the same seed draws the same.

    small: the values of a tiny config. is_part: of a config with parts, whose widths and vocabularies fit each other.
    """
    draw = Draw(f"{kind.__name__} {seed}")
    names = {field.name for field in dataclasses.fields(kind)}
    default = _default(kind)
    values: dict[str, Any] = {}
    for name in sorted(names & FREE.keys()):
        if _may_be(default, name, small):
            values[name] = draw.choice(FREE[name])
            if FREE[name] is WIDTHS and dtype_of(seed) != torch.float32:
                values[name] += -values[name] % 8  # as transformers' products of experts ask in half precision
    values |= _heads(names, small, draw, is_part=is_part)
    if not is_part and "vocab_size" in names:
        values |= dict.fromkeys(names & {"vocab_size", "vocab_size_per_layer_input"}, draw.choice(ODDS))
    if "mamba_n_heads" in names or "mamba_num_heads" in names or {"expand", "num_heads", "head_dim"} <= names:
        values |= _scanned(names, small, values, draw)
    count = next((small[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if n in small), None)
    if count is not None:
        values |= _layers(names, default, small, count, draw=draw)
    return values | _rotations(names, default, small | values, draw)


def dtype_of(seed: int) -> torch.dtype:
    """The dtype of the variant of this number."""
    return DTYPES[seed % len(DTYPES)]


def _default(kind: type[PreTrainedConfig]) -> Any:
    try:
        return kind()
    except Exception:  # composite configs want their parts
        return None


def _may_be(default: Any, name: str, small: dict[str, Any]) -> bool:
    """Whether a config's field is of one number for all layers, and one that the model is made with."""
    value = small.get(name, getattr(default, name, None))
    if isinstance(value, list | tuple) and name != "time_step_limit":
        return False
    if name == "num_kv_shared_layers" and not small.get("num_hidden_layers", 0) > 2:
        return False
    return name not in ("final_logit_softcapping", "sliding_window") or hasattr(default, name)


def _heads(names: set[str], small: dict[str, Any], draw: Draw, *, is_part: bool) -> dict[str, Any]:
    """Heads, as many of keys as divide them, and the widths that follow from them."""
    widths = [name for name in ("hidden_size", "n_embd", "d_model", "embed_dim") if name in names]
    width = small.get(widths[0]) if widths else None
    many = [n for n in ("num_attention_heads", "n_head", "num_heads", "attention_heads") if n in names]
    sides = [n for n in ("encoder_attention_heads", "decoder_attention_heads") if n in names]
    if "kv_lora_rank" in small or not (many or sides) or not isinstance(width, int) or "expand" in names:
        heads = draw.choice((2, 4)) if "kv_lora_rank" in small else None
        return {} if heads is None else {"num_attention_heads": heads, "num_key_value_heads": heads}
    if is_part:
        heads = draw.choice((2, 4, 8))
    else:
        heads = draw.choice((2, 3, 4, 6, 8))
        width = heads * draw.choice((8, 16, 24, 32))
    values = dict.fromkeys(many, heads) | {name: draw.choice(_divisors(width)) for name in sides}
    values |= {} if is_part else dict.fromkeys(widths, width)
    if "head_dim" in names and "head_dim" in small:
        values["head_dim"] = draw.choice((8, 16, 24, 32))
    ratio = draw.choice([n for n in (1, 2, 3, 4, 8) if heads % n == 0])
    values |= dict.fromkeys(names & {"num_key_value_heads", "num_kv_heads"}, heads // ratio)
    return values


def _divisors(width: int) -> list[int]:
    return [n for n in (1, 2, 3, 4, 6, 8) if width % n == 0 and (width // n) % 8 == 0]


def _scanned(names: set[str], small: dict[str, Any], values: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """Heads of a scan over states, which together are twice as wide as the model."""
    inner = 2 * (values.get("hidden_size") or small["hidden_size"])
    size = draw.choice([n for n in (8, 16, 32) if inner % (2 * n) == 0])
    found = {"mamba_n_heads": inner // size, "mamba_num_heads": inner // size, "mamba_d_head": size}
    found |= {"mamba_head_dim": size, "mamba_d_ssm": inner}
    if "expand" in names and "num_heads" in names:
        found |= {"num_heads": inner // size, "head_dim": size}
    return {name: value for name, value in found.items() if name in names}


def _layers(names: set[str], default: Any, small: dict[str, Any], count: int, *, draw: Draw) -> dict[str, Any]:
    """Layers of the kinds that the family has, in any mix; as many as any, where nothing else is told for each."""
    listed = {name for name, value in small.items() if isinstance(value, list | tuple) and len(value) == count}
    values: dict[str, Any] = {}
    if not listed - {"layer_types"} and small.get("num_kv_shared_layers") is None:
        count = draw.choice((1, 2, 3, 4))
        values |= dict.fromkeys(names & {"num_hidden_layers", "n_layer", "num_layers", "encoder_layers"}, count)
        values |= dict.fromkeys(names & {"decoder_layers", "num_decoder_layers"}, draw.choice((1, 2, 3)))
        values |= dict.fromkeys(names & {"num_blocks"}, count)
    if "max_window_layers" in names:
        values["max_window_layers"] = draw.randrange(count + 1)
    kinds = sorted(set(small.get("layer_types") or getattr(default, "layer_types", None) or ()))
    if "layer_types" in names and kinds:
        values["layer_types"] = [draw.choice(kinds) for _ in range(count)]
    return values


def _rotations(names: set[str], default: Any, values: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """One of transformers' rotations for all layers, or one for each kind of them."""
    parameters = values.get("rope_parameters", getattr(default, "rope_parameters", None))
    if not isinstance(parameters, dict) or "max_position_embeddings" not in names:  # of patches, which have another
        return {}
    kinds = (ROTATIONS[0], CHANGING[1]) if type(default).__name__ in LONG_ONLY else ROTATIONS
    kinds = CHANGING if kinds is ROTATIONS and draw.random() < 0.12 else kinds

    def made(one: dict[str, Any]) -> dict[str, Any]:
        return _rotation(one, dict(draw.choice(kinds)), values, draw)

    if "rope_theta" in parameters and "mrope_section" not in parameters:
        found = made(parameters)
    elif parameters and all(isinstance(one, dict) and "rope_theta" in one for one in parameters.values()):
        if any("mrope_section" in one for one in parameters.values()):
            return {}
        found = {name: made(one) for name, one in parameters.items()}
    else:
        return {}
    types = [one["rope_type"] for one in (found.values() if "rope_type" not in found else [found])]
    few = {"max_position_embeddings": SMALL_ROTATION} if "dynamic" in types or draw.random() < 0.2 else {}
    longrope = {"original_max_position_embeddings": SMALL_ROTATION} if "longrope" in types else {}
    return {"rope_parameters": found} | {name: v for name, v in (few | longrope).items() if name in names}


def _rotation(
    parameters: dict[str, Any], chosen: dict[str, Any], values: dict[str, Any], draw: Draw
) -> dict[str, Any]:
    """The chosen rotation for a config that has these parameters."""
    size = values.get("head_dim") or values.get("qk_rope_head_dim")
    if values.get("qk_rope_head_dim"):
        size = values["qk_rope_head_dim"]
    size = size or values.get("hidden_size", 64) // values.get("num_attention_heads", 4)
    part = parameters.get("partial_rotary_factor")
    if parameters.get("rope_type") in ("proportional", "axial"):
        return parameters | {"rope_theta": draw.choice((100.0, 1e4))}
    kept = {}
    if part is not None:
        kept["partial_rotary_factor"] = part = draw.choice((0.25, 0.5, 0.75, 1.0))
    if chosen["rope_type"] == "longrope":
        half = int(size * (part or 1.0)) // 2
        chosen["short_factor"] = [round(draw.uniform(0.8, 2), 2) for _ in range(half)]
        chosen["long_factor"] = [round(draw.uniform(1, 6), 2) for _ in range(half)]
    return chosen | kept | {"rope_theta": draw.choice((100.0, 1e4))}
