"""A tiny configuration of any model type, derived from the defaults of its config class.

Known size fields are shrunk by name, lists with one entry per layer are cut, token ids are brought into the small
vocabulary, sub-configs go the same way. OVERRIDES holds what the names cannot say.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from .overrides import CONSTRUCTED, OVERRIDES
from .variants import Draws

VOCABULARY = 131
PADDING, BEGIN, END = 0, 1, 2
FIRST_SPECIAL = 120  # ids of images, audio and so on are counted from here; prompts stay below
LAYERS = 2
WINDOW = 6

HEADS = 4
HEAD_DIM = 16
HIDDEN = HEADS * HEAD_DIM

SIZES: dict[str, int] = {
    # tokens and positions
    "vocab_size": VOCABULARY, "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY, "text_vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_source_positions": 64,
    "max_target_positions": 256, "max_sequence_length": 256, "max_seq_len": 256, "context_length": 256,
    "max_encoder_position_embeddings": 256, "max_decoder_position_embeddings": 256, "max_2d_position_embeddings": 64,
    "original_max_position_embeddings": 256, "sliding_window": WINDOW, "attention_window_size": WINDOW,
    "sliding_window_size": WINDOW, "local_attention": 2 * WINDOW,
    "attention_chunk_size": 32, "position_embedding_size": 64, "num_position_embeddings": 64,
    "relative_attention_max_distance": 16, "relative_attention_num_buckets": 8,
    # widths
    "hidden_size": HIDDEN, "d_model": HIDDEN, "n_embd": HIDDEN, "dim": HIDDEN, "emb_dim": HIDDEN,
    "embedding_size": HIDDEN, "embed_dim": HIDDEN, "decoder_hidden_size": HIDDEN, "encoder_hidden_size": HIDDEN,
    "text_hidden_size": HIDDEN, "out_hidden_size": HIDDEN, "output_hidden_size": HIDDEN, "lm_hidden_size": HIDDEN,
    "projection_dim": HIDDEN, "projector_hidden_size": HIDDEN, "backbone_hidden_size": HIDDEN,
    "hidden_size_per_layer_input": 16, "projection_hidden_size": HIDDEN, "image_text_hidden_size": HIDDEN,
    "patch_embed_hidden_size": HIDDEN, "vision_hidden_size": HIDDEN, "audio_hidden_size": HIDDEN,
    "intermediate_size": 96, "ffn_dim": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "d_ff": 96, "n_inner": 96,
    "hidden_dim": 96, "d_inner": 96, "mlp_dim": 96, "dff": 96, "dim_ff": 96, "intermediate_size_mlp": 96,
    "ffn_hidden_size": 96, "dense_intermediate_size": 96, "moe_hidden_size": HIDDEN,
    "projection_intermediate_size": 96,
    "alignment_intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "share_expert_dim": 32, "moe_latent_size": 32, "lru_width": HIDDEN, "adapter_rank": 8, "router_hidden_size": 32,
    # heads
    "num_attention_heads": HEADS, "n_head": HEADS, "num_heads": HEADS, "n_heads": HEADS, "attention_heads": HEADS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "num_encoder_attention_heads": HEADS,
    "num_decoder_attention_heads": HEADS, "num_key_value_heads": 2, "num_kv_heads": 2,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": 2, "global_num_key_value_heads": 2, "num_global_key_value_heads": 2,
    "decoder_num_key_value_heads": 2, "encoder_num_key_value_heads": 2,
    "head_dim": HEAD_DIM, "d_kv": HEAD_DIM, "d_head": HEAD_DIM, "dim_head": HEAD_DIM, "kv_channels": HEAD_DIM,
    "swa_head_dim": HEAD_DIM, "global_head_dim": HEAD_DIM,
    "query_pre_attn_scalar": HEAD_DIM, "rotary_dim": HEAD_DIM // 2, "v_head_dim": HEAD_DIM, "swa_v_head_dim": HEAD_DIM,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": HEAD_DIM, "q_lora_rank": 32, "kv_lora_rank": 32, "o_lora_rank": 32,
    "o_groups": 2, "qk_head_dim": HEAD_DIM + 8,
    "index_head_dim": HEAD_DIM, "index_n_heads": 24, "index_topk": 8, "d_rel": 8, "rel_extent": 32,
    # layers
    "num_hidden_layers": LAYERS, "n_layer": LAYERS, "num_layers": LAYERS, "n_layers": LAYERS, "depth": LAYERS,
    "layers": LAYERS, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "num_encoder_layers": LAYERS,
    "speech_encoder_layers": LAYERS, "speech_encoder_attention_heads": HEADS, "speech_encoder_intermediate_size": 96,
    "num_decoder_layers": LAYERS, "max_window_layers": 1, "num_global_layers": 1, "num_blocks": LAYERS,
    "num_mtp_layers": 0, "num_nextn_predict_layers": 0, "num_kv_shared_layers": 0, "resampler_depth": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    "encoder_sparse_step": 2, "decoder_sparse_step": 1,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "top_k": 2, "num_shared_experts": 1, "n_shared_experts": 1, "moe_num_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "zero_expert_num": 2, "expert_capacity": 64, "num_experts_per_token": 2,
    "top_k_experts": 2,
    # states
    "mamba_d_state": 8, "mamba_d_head": HEAD_DIM, "mamba_n_heads": 8, "mamba_chunk_size": 16, "mamba_dt_rank": 4,
    "mamba_num_heads": 8, "mamba_head_dim": HEAD_DIM, "state_size": 8, "ssm_state_size": 8, "mamba_headdim": HEAD_DIM,
    "n_groups": 1, "mamba_ngroups": 1, "n_mamba_heads": 2, "mamba_n_groups": 1, "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_head_dim": HEAD_DIM, "linear_num_heads": HEADS, "time_step_rank": 4,
    # images and sound
    "image_size": 32, "patch_size": 8, "img_size": 32, "crop_size": 32, "image_seq_length": 16,
    "num_mel_bins": 16, "n_mel_bins": 16, "num_query_tokens": 4, "vision_output_dim": HIDDEN,
    "projector_input_dim": HIDDEN, "projector_output_dim": HIDDEN, "output_dim": HIDDEN, "num_image_tokens": 16,
    "mm_tokens_per_image": 4, "resampler_n_latents": 4, "resampler_n_heads": HEADS, "resampler_head_dim": HEAD_DIM,
    "window_size": 4, "output_channels": HIDDEN, "vision_soft_tokens_per_image": 16, "num_patches": 16,
    "codebook_size": 64, "num_embeddings": 64, "base_channels": 32, "resolution": 32, "latent_channels": 32,
    "max_num_tiles": 2, "hidden_act_scale": 1, "pos_emb_height": 8, "pos_emb_width": 8,
    "max_image_size": 64, "min_image_size": 8,
}  # fmt: skip

MISSING = {"head_dim", "vocab_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"}  # None by default


def tiny_config(
    model_type: str, kind: type[PreTrainedConfig] | None = None, *, draws: Draws | None = None, **given: Any
) -> PreTrainedConfig:
    """A tiny config of a model type; kind: what the model's class takes, which may be a part of that type's."""
    if model_type in CONSTRUCTED:
        return CONSTRUCTED[model_type](tiny_config)
    return shrunk(kind or CONFIG_MAPPING[model_type], draws=draws, **given)


def shrunk(
    kind: type[PreTrainedConfig], *, draws: Draws | None = None, is_part: bool = False, **given: Any
) -> PreTrainedConfig:
    """kind with every known size made small; given: values that the model's class asks for.

    draws: other values for it and its parts (variants.py).
    """
    values: dict[str, Any] = {}
    parts = getattr(kind, "sub_configs", {}) | getattr(kind, "sub_configs_defaults", {})
    for name, part in parts.items():
        values[name] = shrunk(_sub_class(part, kind, name), draws=draws, is_part=True)
    default = _default(kind)
    for field in dataclasses.fields(kind):
        if field.name in values or field.name.startswith("_"):
            continue
        small = _small(field.name, value := _value(default, field))
        if small is not value:
            values[field.name] = small
    values |= _layer_lists(default, values) | _token_ids(kind, default) | _rotary_sections(kind, default)
    if values.get("kv_lora_rank"):
        values["num_key_value_heads"] = HEADS  # each head makes its own K from the compressed one
    values |= OVERRIDES.get(kind.__name__, {})
    if draws is not None:
        values |= draws.of(kind, values | given, is_part=is_part or bool(parts))
    return kind(**values | given)


def _sub_class(spec: Any, kind: type[PreTrainedConfig], name: str) -> type[PreTrainedConfig]:
    if spec is AutoConfig:  # as older transformers declares the parts of a config
        return type(getattr(kind(), name))
    if isinstance(spec, type):
        return spec
    if isinstance(spec.config_class, type) and issubclass(spec.config_class, PreTrainedConfig):
        return spec.config_class
    return spec.get_config_class(spec.model_type)


def _default(kind: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    try:
        return kind()
    except Exception:  # composite configs want their parts
        return None


def _value(default: PreTrainedConfig | None, field: dataclasses.Field[Any]) -> Any:
    """What a config has by default, or what its class declares where that is another for each layer."""
    try:
        return _declared(field) if default is None else getattr(default, field.name, None)
    except RuntimeError:
        return _declared(field)


def _declared(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _small(name: str, value: Any) -> Any:
    size = SIZES.get(name)
    if size is None or isinstance(value, bool):
        return value
    if value is None and name in MISSING:
        return size
    if isinstance(value, int):
        return min(value, size) if value >= 0 else value
    if isinstance(value, list | tuple) and name in ("image_size", "patch_size"):
        return type(value)(min(v, size) for v in value)
    return value


def _layer_lists(default: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Lists with one entry for each layer, one entry of each kind in the order of appearance; as many layers."""
    name = next((n for n in ("num_hidden_layers", "n_layer", "num_layers") if n in values), None)
    if default is None or name is None:
        return {}
    count = getattr(default, name)
    lists = {
        field.name: value
        for field in dataclasses.fields(default)
        if isinstance(value := _value(default, field), list | tuple) and len(value) == count
    }
    rows = list(zip(*lists.values(), strict=True)) if lists else []
    picked: list[Any] = []
    for row in rows:
        if row not in picked and len(picked) < 4:
            picked.append(row)
    while rows and len(picked) < LAYERS:
        picked.append(rows[len(picked) % len(rows)])
    if not picked:
        return {}
    columns = zip(*picked, strict=True)
    return {name: len(picked)} | {key: list(column) for key, column in zip(lists, columns, strict=True)}


def _token_ids(kind: type[PreTrainedConfig], default: Any) -> dict[str, Any]:
    """Ids within the small vocabulary; those of images and the like are different ones behind those of prompts."""
    known = {"pad_token_id": PADDING, "bos_token_id": BEGIN, "eos_token_id": END, "decoder_start_token_id": BEGIN}
    ids, special = {}, FIRST_SPECIAL
    for field in dataclasses.fields(kind):
        value = _value(default, field)
        if field.name in known:
            if value is not None or field.name != "decoder_start_token_id":
                ids[field.name] = known[field.name]
        elif field.name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= 0:
            ids[field.name] = special
            special += 1
    return ids


def _rotary_sections(kind: type[PreTrainedConfig], default: Any) -> dict[str, Any]:
    """Sections of the rotated halves for time, height and width, which add up to that of the small head."""
    parameters = getattr(default, "rope_parameters", None) or {}
    if "mrope_section" not in getattr(kind, "ignore_keys_at_rope_validation", ()):
        return {}
    half = int(HEAD_DIM * parameters.get("partial_rotary_factor", 1.0)) // 2
    side = half // 4
    section = [half - 2 * side, side, side]
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | parameters | {"mrope_section": section}}
