"""Makes the Sampling of a request as Engine.submit does, for tests that have no model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import GenerationConfig, GenerationMixin

from hf_accel.generation.hf.config_settings import settings_of_config
from hf_accel.generation.hf.request_config import request_config
from hf_accel.generation.sampling.sampling import Sampling


class Stub(GenerationMixin):
    """What a request needs of a model: a vocabulary, and a GenerationConfig for its defaults."""

    device = "cpu"

    def __init__(self, vocabulary_size: int, **defaults: Any) -> None:
        config = SimpleNamespace(vocab_size=vocabulary_size, is_encoder_decoder=False)
        config.get_text_config = lambda decoder: config
        self.config = config
        self.generation_config = GenerationConfig(**defaults)


def request_sampling(vocabulary_size: int = 400, num_prompt: int = 3, **keywords: Any) -> Sampling:
    """The Sampling of submit(**keywords) after a prompt of `num_prompt` tokens."""
    model = Stub(vocabulary_size)
    config, processors = request_config(model, keywords, ())
    model._prepare_special_tokens(config, device="cpu")
    more = {"processors": processors, "num_logprobs": keywords.get("logprobs")}
    return settings_of_config(model, config, [0] * num_prompt, {}, **more).sampling
