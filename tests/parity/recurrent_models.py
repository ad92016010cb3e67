"""Tiny models whose layers keep recurrent states: the gated delta rule, and the state spaces of Mamba."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)

from .families import VOCABULARY

LINEAR, FULL = "linear_attention", "full_attention"
LAYERS = [LINEAR, FULL, LINEAR, LINEAR, FULL]
DELTA_RULES = ("next", "next_moe", "3.5", "3.5_moe")
STATE_SPACES = ("mamba2", "bamba", "falcon_h1", "granite", "nemotron_h", "zamba2", "mamba", "falcon_mamba", "jamba")
TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
DELTA_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "initializer_range": 0.25,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip


def delta_rule_of(kind: str, layers: Sequence[str], *, tokens: int, repeats: int, **other: Any) -> Any:
    """A model with the gated delta rule. repeats: the heads of values for each head of keys."""
    torch.manual_seed(3)
    sizes = TOKENS | ATTENTION | DELTA_SIZES | {"num_hidden_layers": len(layers), "layer_types": list(layers)}
    sizes |= {"linear_num_value_heads": 2 * repeats, "linear_conv_kernel_dim": tokens} | other
    if kind == "next":
        return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, num_experts=0)).eval()
    if kind == "next_moe":
        return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **EXPERTS)).eval()
    if kind == "3.5":
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes)).eval()
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**sizes, **EXPERTS)).eval()


def state_space_of(kind: str, layers: Sequence[str], *, tokens: int, repeats: int, hidden_size: int = 32) -> Any:
    """A model with the state spaces of Mamba. repeats: twice as many heads for each one more."""
    heads, groups, inner = 2**repeats, 2, 2 * hidden_size
    sizes = TOKENS | ATTENTION | {"hidden_size": hidden_size, "intermediate_size": 64}
    numbers = (heads, inner // heads, 16, groups, tokens)
    named = dict(zip(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"), numbers))
    if kind == "mamba2":
        own = dict(zip(("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"), numbers))
        model: Any = Mamba2ForCausalLM(
            Mamba2Config(**TOKENS, **own, hidden_size=hidden_size, num_hidden_layers=3, chunk_size=8)
        )
    elif kind == "bamba":
        sizes |= named | {"num_hidden_layers": len(layers), "mamba_chunk_size": 8}
        model = BambaForCausalLM(
            BambaConfig(**sizes, attn_layer_indices=[i for i, name in enumerate(layers) if name == FULL])
        )
    elif kind == "falcon_h1":
        norms = {"mamba_rms_norm": repeats != 2, "mamba_norm_before_gate": repeats == 3}
        scales = {"ssm_in_multiplier": 1.5, "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7], "mamba_d_ssm": inner}
        model = FalconH1ForCausalLM(
            FalconH1Config(**sizes, **named, **norms, **scales, num_hidden_layers=3, mamba_chunk_size=8)
        )
    elif kind == "granite":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
        sizes |= named | experts | {"num_hidden_layers": len(layers), "layer_types": list(layers)}
        model = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**sizes, mamba_chunk_size=8))
    elif kind == "nemotron_h":
        own = dict(
            zip(("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"), numbers)
        )
        blocks = ["mlp", *layers, "moe"]  # a first layer that keeps nothing
        # Steps of a prompt have a least one, those of generated tokens have none.
        model = NemotronHForCausalLM(
            NemotronHConfig(
                **sizes, **own, **ROUTED, head_dim=8, chunk_size=8, layers_block_type=blocks, time_step_min=0.5
            )
        )
    elif kind in ("mamba", "falcon_mamba"):
        own = {"state_size": 16, "conv_kernel": tokens, "time_step_rank": 4, "hidden_size": hidden_size}
        make, make_config = {
            "mamba": (MambaForCausalLM, MambaConfig), "falcon_mamba": (FalconMambaForCausalLM, FalconMambaConfig)
        }[kind]  # fmt: skip
        model = make(make_config(**TOKENS, **own, num_hidden_layers=3))
    elif kind == "jamba":
        own = {"mamba_d_state": 16, "mamba_d_conv": tokens, "mamba_dt_rank": 4, "num_hidden_layers": 4}
        own |= {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        model = JambaForCausalLM(JambaConfig(**sizes, **own, num_experts=4, num_experts_per_tok=2))
    else:
        own = dict(zip(("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"), numbers))
        sizes |= {"num_key_value_heads": 4}  # whose number the adapters need
        blocks = ["hybrid" if name == FULL else LINEAR for name in layers]
        model = Zamba2ForCausalLM(
            Zamba2Config(
                **sizes, **own, num_hidden_layers=len(blocks), layers_block_type=blocks, chunk_size=8,
                num_mem_blocks=1, use_shared_attention_adapter=repeats == 3, use_mem_rope=repeats == 1,
                adapter_rank=4, time_step_min=0.5,
            )
        )  # fmt: skip
    return _with_random_numbers(model).eval()


@torch.no_grad()
def _with_random_numbers(model: nn.Module) -> nn.Module:
    """Give each parameter numbers that matter, where transformers begins with ones, zeros or powers."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        size = 0.3 if parameter.ndim == 1 else 0.5 if "conv1d" in name else 0.2
        parameter.normal_(1.0 if parameter.ndim == 1 and "norm" in name else 0.0, size)
    return model
