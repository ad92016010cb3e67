"""The defaults of a request, which come from the model's generation_config."""

from __future__ import annotations

from typing import Any

NEW_TOKENS = 20  # the default of transformers
NAMES = ("top_k", "top_p", "min_p", "repetition_penalty")


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


def sampling_defaults(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Add the sampling parameters of the model's generation_config to the given ones, which take precedence.

    A given temperature decides between greedy search (0) and sampling. Without one, do_sample of the config decides.
    """
    config = model.generation_config
    defaults: dict[str, Any] = {"repetition_penalty": config.repetition_penalty or 1.0}
    if "temperature" not in given:
        temperature = 1.0 if config.temperature is None else config.temperature
        defaults["temperature"] = temperature if config.do_sample else 0.0
    if config.do_sample:
        defaults |= {name: getattr(config, name) for name in NAMES if getattr(config, name) is not None}
    return {**defaults, **given}
