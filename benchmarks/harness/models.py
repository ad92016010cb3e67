"""The models that are measured, made on the spot: bench-1b has 1.1 B parameters, far more than any cache holds.

bench-8b has the shape of Llama 3.1 8B.
The others have the shapes of Qwen2-0.5B with fewer words, of the smallest GPT-2, of small Llamas, and of a Qwen3-MoE
and a gpt-oss with few layers.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

MODELS: dict[str, dict[str, Any]] = {
    "bench-1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "bench-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "bench-14m": {
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "bench-qwen2": {
        "vocab_size": 32000,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "bench-gpt2": {"vocab_size": 50257, "tie_word_embeddings": True},
    "bench-qwen3-moe": {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "moe_intermediate_size": 512,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "bench-gpt-oss": {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "pad_token_id": 0,
    },
}
CONFIGS: dict[str, type[PreTrainedConfig]] = {  # else LlamaConfig
    "bench-qwen2": Qwen2Config,
    "bench-gpt2": GPT2Config,
    "bench-qwen3-moe": Qwen3MoeConfig,
    "bench-gpt-oss": GptOssConfig,
}
BLOCK = 2**22 + 15  # odd, so that no row of a matrix repeats another: equal rows would tie


def load_model(
    name: str,
    *,
    layers: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> PreTrainedModel:
    """A model as transformers runs it best (sdpa): random if `name` is in MODELS, else a checkpoint."""
    if name not in MODELS:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        return model.to(device).eval()
    shape = {"tie_word_embeddings": False, **MODELS[name]}
    shape = shape if layers is None else {**shape, "num_hidden_layers": layers}
    config = CONFIGS.get(name, LlamaConfig)(**shape, eos_token_id=None)
    if device != "cpu":
        return random_model_on(device, config, seed=seed, dtype=dtype)
    return random_model(config, seed=seed, dtype=dtype)


def random_model_on(
    device: str, config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Weights as transformers draws them, drawn on the device, so that they never pass through the host."""
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def random_model(config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Weights cut from one seeded block, repeated: drawing a billion normal numbers would take a minute."""
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config)
    block = shapes.config.initializer_range * torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed))
    block = block.bfloat16()
    weights, start = {}, 0
    for name, parameter in shapes.named_parameters():
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        weights[name] = torch.ones(parameter.shape) if is_norm else cut(block, parameter.shape, start=start)
        start = (start + parameter.numel()) % BLOCK
    model: PreTrainedModel = type(shapes).from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    return model.eval()


def cut(block: Tensor, shape: torch.Size, *, start: int) -> Tensor:
    repeats = -(-(start + shape.numel()) // len(block))
    return block.repeat(repeats)[start : start + shape.numel()].clone().view(shape)


def from_checkpoint(model: PreTrainedModel) -> PreTrainedModel:
    """The model as a user has it, mapped from a checkpoint, which is on the disk until nobody uses its memory.

    Linux may hold the pages of a file in larger units than those that are given to torch, which are read faster. The
    weights of llama.cpp are mapped, too.
    """
    with tempfile.TemporaryDirectory(prefix="hf_accel-checkpoint-") as folder:
        model.save_pretrained(folder)
        loaded: PreTrainedModel = type(model).from_pretrained(folder, dtype=model.dtype)
    return loaded.eval()


def reload(model: PreTrainedModel, **keywords: Any) -> PreTrainedModel:
    """The model's weights through from_pretrained with other keywords (dtype, quantization_config, ...)."""
    keywords = {"dtype": model.dtype, **keywords}
    config = copy.deepcopy(model.config)
    loaded = type(model).from_pretrained(None, config=config, state_dict=dict(model.state_dict()), **keywords)
    return loaded.eval()


def weight_bytes(model: PreTrainedModel, *, skip: tuple[str, ...] = ()) -> int:
    """Bytes of what state_dict holds, each tensor once."""
    tensors = {id(t): t for name, t in model.state_dict(keep_vars=True).items() if name not in skip}
    return sum(tensor_bytes(t) for t in tensors.values() if isinstance(t, Tensor))


def tensor_bytes(tensor: Tensor) -> int:
    """Also of tensor subclasses that say they are wide and hold narrow ones."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(tensor_bytes(getattr(tensor, name)) for name in names)
    return tensor.nbytes


def read_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a decode step reads: all but the input embedding, unless it is the head as well."""
    table = model.get_input_embeddings().weight
    tied = getattr(model.get_output_embeddings(), "weight", None) is table
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is table]
    return weight_bytes(model, skip=() if tied else tuple(names))
