"""bitsandbytes as transformers loads it: NF4, and LLM.int8()."""

from __future__ import annotations

import logging

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from ..harness.models import reload
from .base import Setup, missing


class BitsAndBytes(Setup):
    is_peer = True

    def __init__(self, name: str, config: dict[str, object], *, tolerance: float) -> None:
        self.name = f"bitsandbytes {name}"
        self.config = config
        self.tolerance = tolerance

    def refuses(self, config: PreTrainedConfig) -> str | None:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a cast at every call of every layer
        return missing("bitsandbytes")

    def prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        return reload(model, quantization_config=BitsAndBytesConfig(**self.config), device_map="cpu")


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
SETUPS = (
    BitsAndBytes("nf4", NF4, tolerance=0.9),
    BitsAndBytes("int8", {"load_in_8bit": True}, tolerance=0.15),
)
