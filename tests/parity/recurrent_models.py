"""Tiny models whose layers keep recurrent states: the gated delta rule, the state spaces of Mamba, and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    MiniMaxConfig,
    MiniMaxForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
    ZambaConfig,
    ZambaForCausalLM,
    xLSTMConfig,
    xLSTMForCausalLM,
)

from .families import VOCABULARY
from .older import skip_older_code

LINEAR, FULL = "linear_attention", "full_attention"
LAYERS = [LINEAR, FULL, LINEAR, LINEAR, FULL]
DELTA_RULES = ("next", "next_moe", "3.5", "3.5_moe")
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


class Sizes(NamedTuple):
    """The sizes of a Mamba 2 layer, and of what is around it."""

    heads: int
    head_dim: int
    state: int
    groups: int
    tokens: int
    hidden: int
    repeats: int

    def named(self, *names: str) -> dict[str, Any]:
        """The first five, by the names that a family gives them."""
        return dict(zip(names, self[:5], strict=True))

    @property
    def of_bamba(self) -> dict[str, Any]:
        return self.named("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")


def state_space_of(kind: str, layers: Sequence[str], *, tokens: int, repeats: int, hidden_size: int = 32) -> Any:
    """A model with the state spaces of Mamba. repeats: twice as many heads for each one more."""
    sizes = Sizes(2**repeats, 2 * hidden_size // 2**repeats, 16, 2, tokens, hidden_size, repeats)
    around = TOKENS | ATTENTION | {"hidden_size": hidden_size, "intermediate_size": 64}
    model = _with_random_numbers(MAKERS[kind](sizes, list(layers), around)).eval()
    if kind == "falcon_h1":
        skip_older_code(model, r"FalconH1Mixer uses cache_params\.has_previous_state")
    return model


def _mamba2(sizes: Sizes, layers: list[str], around: dict[str, Any]) -> Any:
    own = sizes.named("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")
    own |= {"hidden_size": sizes.hidden, "num_hidden_layers": 3, "chunk_size": 8}
    return Mamba2ForCausalLM(Mamba2Config(**TOKENS, **own))


def _bamba(sizes: Sizes, layers: list[str], around: dict[str, Any]) -> Any:
    attend = [i for i, name in enumerate(layers) if name == FULL]
    own = sizes.of_bamba | {"attn_layer_indices": attend, "num_hidden_layers": len(layers), "mamba_chunk_size": 8}
    return BambaForCausalLM(BambaConfig(**around, **own))


def _falcon_h1(sizes: Sizes, layers: list[str], around: dict[str, Any]) -> Any:
    own: dict[str, Any] = {"mamba_rms_norm": sizes.repeats != 2, "mamba_norm_before_gate": sizes.repeats == 3}
    own |= {"ssm_in_multiplier": 1.5, "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7], "mamba_d_ssm": 2 * sizes.hidden}
    names = ("ssm_out", "attention_in", "attention_out", "key")
    own |= {f"{name}_multiplier": 0.6 + 0.1 * place for place, name in enumerate(names)}
    own["mlp_multipliers"] = [0.9, 0.5]
    own |= sizes.of_bamba | {"num_hidden_layers": 3, "mamba_chunk_size": 8}
    return FalconH1ForCausalLM(FalconH1Config(**around, **own))


def _granite(sizes: Sizes, layers: list[str], around: dict[str, Any]) -> Any:
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32, "mamba_chunk_size": 8}
    own |= sizes.of_bamba | {"num_hidden_layers": len(layers)}
    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**around, **own, layer_types=layers))


def _nemotron_h(sizes: Sizes, layers: list[str], around: dict[str, Any]) -> Any:
    own = sizes.named("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    blocks = ["mlp", *layers, "moe"]  # whose first keeps nothing
    # Steps of a prompt have a least one, those of generated tokens have none.
    return NemotronHForCausalLM(
        NemotronHConfig(
            **around, **own, **ROUTED, head_dim=8, chunk_size=8, layers_block_type=blocks, time_step_min=0.5
        )
    )


def _zamba2(sizes: Sizes, layers: list[str], around: dict[str, Any]) -> Any:
    own: dict[str, Any] = sizes.named(
        "n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"
    )
    own |= {"use_shared_attention_adapter": sizes.repeats == 3, "use_mem_rope": sizes.repeats == 1, "adapter_rank": 4}
    own |= {"num_mem_blocks": 1, "time_step_min": 0.5, "chunk_size": 8, "num_hidden_layers": len(layers)}
    around |= {"num_key_value_heads": 4}  # whose number the adapters need
    blocks = ["hybrid" if name == FULL else LINEAR for name in layers]
    return Zamba2ForCausalLM(Zamba2Config(**around, **own, layers_block_type=blocks))


def _mamba(sizes: Sizes, layers: list[str], around: dict[str, Any]) -> Any:
    return MambaForCausalLM(MambaConfig(**TOKENS, **_of_mamba(sizes)))


def _falcon_mamba(sizes: Sizes, layers: list[str], around: dict[str, Any]) -> Any:
    return FalconMambaForCausalLM(FalconMambaConfig(**TOKENS, **_of_mamba(sizes)))


def _of_mamba(sizes: Sizes) -> dict[str, Any]:
    own = {"state_size": 16, "conv_kernel": sizes.tokens, "time_step_rank": 4}
    return own | {"hidden_size": sizes.hidden, "num_hidden_layers": 3}


def _jamba(sizes: Sizes, layers: list[str], around: dict[str, Any]) -> Any:
    own = {"mamba_d_state": 16, "mamba_d_conv": sizes.tokens, "mamba_dt_rank": 4, "num_hidden_layers": 4}
    own |= {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    return JambaForCausalLM(JambaConfig(**around, **own, num_experts=4, num_experts_per_tok=2))


def _zamba(sizes: Sizes, layers: list[str], around: dict[str, Any]) -> Any:
    own = {"n_mamba_heads": sizes.heads, "mamba_d_state": 16, "mamba_d_conv": sizes.tokens, "mamba_dt_rank": 4}
    own |= {"num_hidden_layers": len(layers), "head_dim": 8}
    blocks = ["hybrid" if name == FULL else LINEAR for name in layers]
    if blocks.count("hybrid") == 1:  # whose shared layer transformers looks for in other layers, and finds none
        blocks[0] = "hybrid"
    return ZambaForCausalLM(ZambaConfig(**around, **own, layers_block_type=blocks))


def _minimax(sizes: Sizes, layers: list[str], around: dict[str, Any]) -> Any:
    """Lightning attention, whose code computes a prompt in blocks."""
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "block_size": 8}
    own |= {"linear_attn_alpha_factor": 0.9, "linear_attn_beta_factor": 1.2}
    return MiniMaxForCausalLM(MiniMaxConfig(**around, **own, num_hidden_layers=len(layers), layer_types=layers))


def gated_unit_of(blocks: Sequence[str], *, tokens: int, heads: int = 4, window: int = 16, **other: Any) -> Any:
    """A model with gated linear recurrent units. blocks: "recurrent" or "attention", one after the other in turns."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5} | other
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 1, "conv1d_width": tokens}
    config = RecurrentGemmaConfig(**TOKENS, **sizes, block_types=list(blocks), attention_window_size=window)
    model = _with_random_numbers(RecurrentGemmaForCausalLM(config)).eval()
    reason = r"RecurrentGemmaModel uses past_key_values\.first_attention_layer"
    skip_older_code(model, reason, generates="attention" in blocks)
    return model


def time_mixes_of(*, layers: int = 3, rescaled: int = 2) -> Any:
    """RWKV. rescaled: after so many layers each, it halves its hidden states and the weights in front of them."""
    config = RwkvConfig(
        **TOKENS, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, rescale_every=rescaled
    )
    return _with_random_numbers(RwkvForCausalLM(config)).eval()


def matrix_memory_of(*, layers: int = 3, heads: int = 2, keys: float = 0.5, cap: float = 15.0) -> Any:
    """xLSTM. keys: the size of its keys, as a part of hidden_size. cap: of its gates."""
    config = xLSTMConfig(
        **TOKENS, hidden_size=128, embedding_dim=128, num_blocks=layers, num_hidden_layers=layers, num_heads=heads,
        qk_dim_factor=keys, gate_soft_cap=cap, ffn_round_up_to_multiple_of=16,
    )  # fmt: skip
    return _with_random_numbers(xLSTMForCausalLM(config)).eval()


MAKERS: dict[str, Callable[[Sizes, list[str], dict[str, Any]], Any]] = {
    "mamba2": _mamba2, "bamba": _bamba, "falcon_h1": _falcon_h1, "granite": _granite, "nemotron_h": _nemotron_h,
    "zamba2": _zamba2, "mamba": _mamba, "falcon_mamba": _falcon_mamba, "jamba": _jamba,
    "zamba": _zamba, "minimax": _minimax,
}  # fmt: skip
STATE_SPACES = tuple(MAKERS)


@torch.no_grad()
def _with_random_numbers(model: nn.Module) -> nn.Module:
    """Give each parameter numbers that matter, where transformers begins with ones, zeros or powers."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        size = 0.3 if parameter.ndim == 1 else 0.5 if "conv1d" in name else 0.2
        parameter.normal_(1.0 if parameter.ndim == 1 and "norm" in name else 0.0, size)
    return model
