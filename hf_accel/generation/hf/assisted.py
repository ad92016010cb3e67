"""Converts transformers' keywords for assisted decoding to a SpeculativeConfig."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ...config import SpeculativeConfig
from ...models import without_adapters
from .drafting import draft_refusal


def assisted(
    model: Any, generation_config: Any, assistant_model: Any, assistant_tokenizer: Any
) -> tuple[SpeculativeConfig, str | None]:
    """Return the SpeculativeConfig of a call, and why transformers' own loop must serve it (None if it need not)."""
    if assistant_tokenizer is not None:
        return SpeculativeConfig(), "the draft model has another tokenizer"
    lookup = generation_config.prompt_lookup_num_tokens
    if lookup is not None:
        most = generation_config.max_matching_ngram_size or 2
        return SpeculativeConfig(drafter="ngram", max_draft=lookup, ngram=(1, max(1, most))), None
    if assistant_model is None:
        return SpeculativeConfig(), "it asks for a drafter that only transformers has"
    return SpeculativeConfig(drafter=assistant_model), assistant_refusal(model, assistant_model)


def assistant_refusal(model: Any, assistant: Any) -> str | None:
    """Return why transformers' own loop must use this assistant_model=, as one clause; None if it can draft over
    pages.
    """
    draft = without_adapters(assistant)
    return draft_refusal(model, draft) if isinstance(draft, PreTrainedModel) else "the assistant is no model"
