"""llama.cpp through llama-cpp-python: the same weights as GGUF, the same number of threads, flash attention on."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from .base import missing
from .gguf_file import gguf_file, gguf_refuses
from .runtime import RuntimeSetup


class LlamaCpp(RuntimeSetup):
    def __init__(self, kind: str, *, tolerance: float) -> None:
        self.name = f"llama.cpp {kind}"
        self.kind = kind
        self.tolerance = tolerance
        self.multiplies = "float" if kind == "bf16" else "integer"

    def refuses(self, config: PreTrainedConfig) -> str | None:
        return missing("llama_cpp") or missing("gguf") or gguf_refuses(config)

    def prepare(self, model: PreTrainedModel) -> Any:
        from .llama_cpp_model import LlamaCppModel

        return LlamaCppModel(gguf_file(model, self.kind), model.config)

    def read_bytes(self, model: Any) -> int:
        """Without the input embedding, counted at the average number of bits of all weights."""
        config = model.config
        if config.tie_word_embeddings:
            return int(model.nbytes)
        return round(model.nbytes * (1 - config.vocab_size * config.hidden_size / model.num_parameters))


# Its conversions round at other places than torch does; more bits differ than between two runs of torch.
SETUPS = (LlamaCpp("bf16", tolerance=0.1), LlamaCpp("Q8_0", tolerance=0.15), LlamaCpp("Q4_0", tolerance=0.9))
