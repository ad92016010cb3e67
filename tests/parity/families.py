"""Tiny random models of the families that are patched whole, and inputs for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCABULARY = 101
PADDING = 0
WINDOW = 8

DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.25,  # far from the uniform logits, and so the ties, of a usual initialization
    "pad_token_id": PADDING,
    "bos_token_id": None,
    "eos_token_id": None,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**DECODER),
    "qwen2": lambda: Qwen2Config(**DECODER),
    "mistral": lambda: MistralConfig(**DECODER, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(  # tied, its scaled-up embedding would only ever repeat the last token
        **DECODER,
        head_dim=8,
        sliding_window=WINDOW,
        tie_word_embeddings=False,
        attn_logit_softcapping=2.0,
        attn_implementation="eager",  # older transformers takes sdpa, which does not cap
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
        pad_token_id=PADDING,
        bos_token_id=None,
        eos_token_id=None,
    ),
}


def build(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model in eval mode; the same seed gives the same weights."""
    return copy.deepcopy(_built(family, dtype, seed))  # in less than half of the time


@cache
def _built(family: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    config = FAMILIES[family]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)  # transformers sets them to zero, which tests nothing
    return model.to(dtype).eval()


def prompts(batch: int, length: int, *, seed: int = 1) -> Tensor:
    """Random token ids [batch, length], none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def inputs(layout: str) -> dict[str, Tensor]:
    """input_ids and attention_mask: "single" row, or three ragged rows padded on the "left" or the "right"."""
    if layout == "single":
        ids = prompts(1, 13)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    ids, columns = prompts(3, 13), torch.arange(13)
    missing = torch.tensor([[5], [0], [2]])
    mask = (columns >= missing) if layout == "left" else (columns < 13 - missing)
    return {"input_ids": ids.masked_fill(~mask, PADDING), "attention_mask": mask.long()}
