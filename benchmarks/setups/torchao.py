"""torchao's INT8 weights, with activations as they are or quantized too: as transformers loads them, and compiled."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, TorchAoConfig

from ..harness.models import reload
from .base import Setup, missing

CONFIGS = {"int8": "Int8WeightOnlyConfig", "int8 dynamic": "Int8DynamicActivationInt8WeightConfig"}
MOST_SHAPES = 64  # batches and lengths of one run; beyond its limit torch.compile goes back to eager


class TorchAO(Setup):
    is_peer = True

    def __init__(self, kind: str, *, tolerance: float, compiled: bool = False) -> None:
        self.name = f"torchao {kind}" + (" compiled" if compiled else "")
        self.kind = kind
        self.tolerance = tolerance
        self.compiled = compiled
        self.multiplies = "integer" if kind == "int8 dynamic" else "float"
        if compiled:
            self.only_named = "torch.compile takes minutes for each batch; name it in --setups to have it"

    def refuses(self, config: PreTrainedConfig) -> str | None:
        if self.compiled and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            return "torch.compile needs a C++ compiler"
        return missing("torchao")

    def prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        import torchao.quantization

        quantized = TorchAoConfig(getattr(torchao.quantization, CONFIGS[self.kind])())
        loaded: Any = reload(model, quantization_config=quantized, device_map="cpu")
        if self.compiled:
            torch._dynamo.config.recompile_limit = MOST_SHAPES
            loaded.forward = torch.compile(loaded.forward, dynamic=True)
        return loaded


SETUPS = (
    TorchAO("int8", tolerance=0.15),
    TorchAO("int8 dynamic", tolerance=0.25),
    TorchAO("int8", tolerance=0.15, compiled=True),
    TorchAO("int8 dynamic", tolerance=0.25, compiled=True),
)
