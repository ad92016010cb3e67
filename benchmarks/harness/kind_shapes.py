"""The shapes of models whose layers keep other states than keys and values, and of those that read more than text.

Each has the layers of a published model, and fewer words where nothing but a look-up and the head depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    M2M100Config,
    M2M100ForConditionalGeneration,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

WORDS = 32000
Inputs = dict[str, torch.Tensor]


def delta_config(**sizes: Any) -> Qwen3_5TextConfig:
    """Make the config of a Qwen3.5 of width 1,024, in which each fourth layer attends."""
    given = {
        "vocab_size": WORDS, "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return Qwen3_5TextConfig(**given | sizes)


def falcon_config() -> FalconH1Config:
    """Make the config of Falcon-H1 0.5B, whose layers have a state space and attention side by side."""
    return FalconH1Config(
        vocab_size=WORDS, hidden_size=1024, intermediate_size=2048, num_hidden_layers=36, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64, mamba_d_state=128,
        tie_word_embeddings=True,
    )  # fmt: skip


def latent_config() -> DeepseekV3Config:
    """Make the config of a DeepSeek-V3 with the attention of V2-Lite, and experts in all layers but the first."""
    return DeepseekV3Config(
        vocab_size=WORDS, hidden_size=1024, intermediate_size=4096, moe_intermediate_size=768, num_hidden_layers=16,
        num_attention_heads=16, num_key_value_heads=16, q_lora_rank=768, n_routed_experts=16, num_experts_per_tok=4,
        n_group=1, topk_group=1, first_k_dense_replace=1, max_position_embeddings=16384,
    )  # fmt: skip


# -- models that are called with text alone ------------------------------------------------------------


@dataclass(frozen=True)
class TextShape:
    """A causal model. make: its config. context: tokens of a long prompt that is measured too; 0: none."""

    model: type[PreTrainedModel]
    make: Callable[[], Any]
    context: int = 0


TEXT = {
    "gated delta rule, 233 M": TextShape(
        Qwen3_5ForCausalLM,
        lambda: delta_config(num_hidden_layers=12, linear_num_key_heads=8, linear_num_value_heads=8),
    ),
    "gated delta rule, 0.5 B": TextShape(Qwen3_5ForCausalLM, lambda: delta_config(num_hidden_layers=24)),
    "Mamba 2, 0.4 B": TextShape(
        Mamba2ForCausalLM,
        lambda: Mamba2Config(
            vocab_size=WORDS,
            hidden_size=1024,
            num_hidden_layers=48,
            num_heads=32,
            n_groups=1,
            tie_word_embeddings=True,
        ),
    ),
    "Falcon-H1, 0.5 B": TextShape(FalconH1ForCausalLM, falcon_config),
    "compressed keys, 0.7 B": TextShape(DeepseekV3ForCausalLM, latent_config, context=8192),
}


# -- models that are called with more ------------------------------------------------------------------


@dataclass(frozen=True)
class InputShape:
    """A model that generates from other inputs than a prompt. inputs: makes those of so many requests of a config.

    beams: of each request; new_tokens: of each.
    """

    model: type[PreTrainedModel]
    make: Callable[[], Any]
    inputs: Callable[[Any, int], Inputs]
    beams: int = 1
    new_tokens: int = 16


def sentences(config: Any, requests: int) -> Inputs:
    """Draw sentences of 8 to 32 tokens, padded on the right."""
    lengths = torch.linspace(8, 32, requests).long()
    mask = (torch.arange(32) < lengths[:, None]).long()
    tokens = torch.randint(10, config.vocab_size, mask.shape)
    return {"input_ids": tokens.where(mask.bool(), config.pad_token_id), "attention_mask": mask}


def utterances(config: Any, requests: int) -> Inputs:
    """Draw spectra of 30 seconds."""
    return {"input_features": torch.randn(requests, config.num_mel_bins, 2 * config.max_source_positions)}


def images(config: Any, requests: int) -> Inputs:
    """Draw an image and 32 words behind it for each request."""
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
    words = torch.randint(10, config.image_token_id - 10, (requests, 32))
    tokens = torch.cat([torch.full((requests, patches), config.image_token_id), words], dim=1)
    size = (requests, 1, 3, vision.image_size, vision.image_size)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": torch.randn(size)}


def whisper_config() -> WhisperConfig:
    """Make the config of Whisper base."""
    return WhisperConfig(
        d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8,
        encoder_ffn_dim=2048, decoder_ffn_dim=2048,
    )  # fmt: skip


def vision_config() -> SmolVLMConfig:
    """Make the config of SmolVLM 256M."""
    text = {
        "model_type": "llama", "vocab_size": 49280, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 512, "patch_size": 16,
    }  # fmt: skip
    return SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=4, image_token_id=49190, tie_word_embeddings=True
    )


MORE = {
    "NLLB, 0.6 B": InputShape(
        M2M100ForConditionalGeneration,
        lambda: M2M100Config(vocab_size=256206, encoder_ffn_dim=4096, decoder_ffn_dim=4096),
        sentences, beams=4,
    ),
    "Whisper base": InputShape(WhisperForConditionalGeneration, whisper_config, utterances, beams=4),
    "SmolVLM, 256 M": InputShape(SmolVLMForConditionalGeneration, vision_config, images),
}  # fmt: skip


def random_of(shape: TextShape | InputShape, *, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model with weights as transformers draws them."""
    torch.manual_seed(seed)
    config = shape.make()
    config.eos_token_id = None
    made: PreTrainedModel = shape.model._from_config(config, dtype=dtype)
    if made.generation_config is not None:
        made.generation_config.eos_token_id = None
    return made.eval()
