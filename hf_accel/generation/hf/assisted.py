"""transformers' keywords for assisted decoding, as a SpeculativeConfig."""

from __future__ import annotations

from typing import Any

from ...config import SpeculativeConfig


def assisted(
    generation_config: Any, assistant_model: Any, assistant_tokenizer: Any
) -> tuple[SpeculativeConfig, str | None]:
    """What to speculate with, and why it is left to stock's loop, if it is."""
    if assistant_tokenizer is not None:
        return SpeculativeConfig(), "the draft model has another tokenizer"
    lookup = generation_config.prompt_lookup_num_tokens
    if lookup is not None:
        most = generation_config.max_matching_ngram_size or 2
        return SpeculativeConfig(drafter="ngram", max_draft=lookup, ngram=(1, max(1, most))), None
    if assistant_model is None:
        return SpeculativeConfig(), "it asks for a drafter that only stock knows"
    return SpeculativeConfig(drafter=assistant_model), None
