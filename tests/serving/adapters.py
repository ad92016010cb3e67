"""Small LoRA adapters as folders of PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def save_adapter(path: Path, model: Path, *, seed: int) -> None:
    """Write an adapter of random numbers for the queries and the down projections of a model."""
    layers = AutoModelForCausalLM.from_pretrained(model).named_modules()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, module in ((name, each) for name, each in layers if name.endswith(("q_proj", "down_proj"))):
        sizes = {"A": (4, module.in_features), "B": (module.out_features, 4)}
        for matrix, size in sizes.items():
            values = torch.randn(size, generator=generator) * 0.1
            tensors[f"base_model.model.{layer}.lora_{matrix}.weight"] = values
    settings: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, path / "adapter_model.safetensors")
