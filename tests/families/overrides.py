"""What the names of a config's fields cannot say about a tiny one of its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import EncoderDecoderConfig, PreTrainedConfig, VisionEncoderDecoderConfig

OVERRIDES: dict[str, dict[str, Any]] = {}

CONSTRUCTED: dict[str, Callable[[Callable[[str], PreTrainedConfig]], PreTrainedConfig]] = {
    "encoder-decoder": lambda tiny: EncoderDecoderConfig.from_encoder_decoder_configs(tiny("bert"), tiny("bert")),
    "vision-encoder-decoder": lambda tiny: VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        tiny("vit"), tiny("gpt2")
    ),
}
