"""Models whose states are not keys and values, as GGUF files: Mamba 2, and DeepSeek V3 with compressed keys.

Source: conversion/mamba.py and conversion/deepseek.py of llama.cpp, whose names and shapes these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Named = Iterator[tuple[str, Tensor]]
FLOATS = ("ssm_conv1d.weight", "ssm_norm.weight", "ffn_gate_inp.weight")  # matrices that llama.cpp wants in float32
CONTEXT = 1 << 20  # tokens; a state space has no limit, and llama.cpp wants a number


# -- Mamba 2 -------------------------------------------------------------------------------------------


def mamba_settings(writer: Any, config: Any) -> None:
    """Write the hyperparameters of a Mamba 2."""
    writer.add_context_length(CONTEXT)
    writer.add_feed_forward_length(0)  # llama.cpp reads both, and uses neither
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.expand * config.hidden_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.num_heads)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)


def mamba_tensors(model: PreTrainedModel) -> Named:
    """Yield the tensors of a Mamba 2 as llama.cpp shapes them, by transformers' names."""
    config: Any = model.config
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if name.endswith(".A_log"):
            tensor = -tensor.float().exp().unsqueeze(-1)
        elif name.endswith(".D"):
            tensor = tensor.unsqueeze(-1)
        elif name.endswith(".mixer.norm.weight"):
            tensor = tensor.view(config.n_groups, -1)
        elif name.endswith(".conv1d.weight"):
            tensor = tensor.squeeze(1)
        yield name.replace(".dt_bias", ".dt_proj.bias"), tensor


# -- DeepSeek V3 ---------------------------------------------------------------------------------------


def latent_settings(writer: Any, config: Any) -> None:
    """Write the hyperparameters of a DeepSeek V3, whose keys have one head: the latent and the rotated part."""
    import gguf

    rotated = config.qk_rope_head_dim
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(rotated)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + rotated)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotated)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def latent_tensors(model: PreTrainedModel) -> Named:
    """Yield the tensors of a DeepSeek V3 as llama.cpp shapes them, by the names of a checkpoint's."""
    config: Any = model.config
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        weight = tensor.detach()
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}.weight"), half
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", weight
        elif name.endswith("kv_b_proj.weight"):
            heads = weight.view(config.num_attention_heads, -1, weight.shape[-1])
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), weight
        elif "rotary_emb" not in name:
            yield name, weight


# -- the file ------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[str, Callable[[Any, Any], None], Callable[[PreTrainedModel], Named]]] = {
    "mamba2": ("MAMBA2", mamba_settings, mamba_tensors),
    "deepseek_v3": ("DEEPSEEK2", latent_settings, latent_tensors),
}


def write_kind(model: PreTrainedModel, path: Path) -> None:
    """Write a model whose type is one of KINDS, without a tokenizer: matrices in bfloat16, all else in float32."""
    import gguf

    config: Any = model.config
    architecture, settings, tensors = KINDS[config.model_type]
    kind = getattr(gguf.MODEL_ARCH, architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer: Any = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    settings(writer, config)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in tensors(model):
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise RuntimeError(f"llama.cpp has no place for {name!r} in a {config.model_type} model")
        add(writer, gguf, target, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: Any, gguf: Any, name: str, tensor: Tensor) -> None:
    is_matrix = tensor.ndim > 1 and tensor.shape[-1] > 1
    if is_matrix and not name.endswith(FLOATS):
        numbers = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, numbers, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.float().contiguous().numpy())
