"""Published shapes, and small models of the same families."""

from __future__ import annotations

from transformers import (
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
)


def llama_70b(*, kv_heads: int = 8, dtype: str = "bfloat16") -> LlamaConfig:
    return LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=kv_heads,
        vocab_size=128256,
        dtype=dtype,
    )


MIXTRAL_8X7B = MixtralConfig(dtype="bfloat16", sliding_window=None)  # the defaults are the published shape
MISTRAL_7B = MistralConfig(dtype="bfloat16")  # window 4096
GPT2 = GPT2Config(dtype="float32")
QWEN2_HALF_B = Qwen2Config(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
GEMMA2_2B = Gemma2Config(dtype="bfloat16")  # 26 layers, every other one with a window of 4096

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
TINY: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama, own head_dim": LlamaConfig(**SMALL, head_dim=24),
    "mistral": MistralConfig(**SMALL, sliding_window=512),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "qwen2, tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**SMALL, head_dim=16, sliding_window=512),
    "gemma3n, shared KV": Gemma3nTextConfig(
        **{**SMALL, "num_hidden_layers": 6, "intermediate_size": [128] * 6},
        head_dim=16,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=512,
        activation_sparsity_pattern=[0.0] * 6,
        vocab_size_per_layer_input=96,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
    ),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=128),
    "gpt-neox": GPTNeoXConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=96
    ),
    "gpt-bigcode, multi-query": GPTBigCodeConfig(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=128),
    "opt": OPTConfig(
        hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=96, word_embed_proj_dim=64
    ),
    "bloom": BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=96),
    "falcon, multi-query": FalconConfig(**FALCON),
    "falcon, multi-head": FalconConfig(**FALCON, multi_query=False),
    "falcon, grouped": FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
}
