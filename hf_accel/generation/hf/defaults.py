"""The defaults of a request, which come from the model's generation_config."""

from __future__ import annotations

from typing import Any

NEW_TOKENS = 20  # the default of transformers


def stop_token_ids(model: Any) -> tuple[int, ...]:
    """The end-of-sequence token ids of the model."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return ()
    return tuple(ends) if isinstance(ends, list | tuple) else (int(ends),)


def default_new_tokens(config: Any, num_prompt: int) -> int:
    """The number of new tokens that a GenerationConfig allows after a prompt of `num_prompt` tokens."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    return NEW_TOKENS if config.max_length is None else max(1, config.max_length - num_prompt)
