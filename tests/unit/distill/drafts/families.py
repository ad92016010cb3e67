"""Small random models of several families, in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

V = 61
SMALL: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
HEADS: dict[str, Any] = {**GROUPED, "head_dim": 8}
KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


def llama(**changes: Any) -> Any:
    return made(LlamaForCausalLM, LlamaConfig(**{**GROUPED, **changes}))


def made(kind: Callable[[Any], nn.Module], config: Any) -> Any:
    """Weights large enough for layers to matter."""
    torch.manual_seed(1)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model.eval()


DECODERS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "qwen2": lambda: made(
        Qwen2ForCausalLM, Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=6, max_window_layers=2)
    ),
    "gemma2": lambda: made(Gemma2ForCausalLM, Gemma2Config(**HEADS, sliding_window=6)),
    "gemma3": lambda: made(Gemma3ForCausalLM, Gemma3TextConfig(**HEADS, sliding_window=6, layer_types=KINDS)),
    "smollm3": lambda: made(SmolLM3ForCausalLM, SmolLM3Config(**GROUPED, no_rope_layers=[1, 0, 0, 1])),
    "qwen3 moe": lambda: made(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **HEADS, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0, 3]
        ),
    ),
    "gpt2": lambda: made(
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=V, n_embd=32, n_layer=4, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
        ),
    ),
}
ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: made(BertForMaskedLM, BertConfig(**SMALL)),
    "distilbert": lambda: made(
        DistilBertForSequenceClassification,
        DistilBertConfig(vocab_size=V, dim=32, hidden_dim=48, n_layers=4, n_heads=4, num_labels=3),
    ),
}
