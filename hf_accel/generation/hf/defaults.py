"""What a request takes from the model's generation_config."""

from __future__ import annotations

from typing import Any

NEW_TOKENS = 20  # transformers' own default
NAMES = ("top_k", "top_p", "min_p", "repetition_penalty")


def stop_token_ids(model: Any) -> tuple[int, ...]:
    """The end-of-sequence ids."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return ()
    return tuple(ends) if isinstance(ends, list | tuple) else (int(ends),)


def default_new_tokens(config: Any, num_prompt: int) -> int:
    """What a GenerationConfig says of a prompt's continuation."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    return NEW_TOKENS if config.max_length is None else max(1, config.max_length - num_prompt)


def sampling_defaults(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """`given`, and what it leaves out as the model's own config has it. A temperature asks for sampling, and so does a
    config with do_sample, unless the temperature given is 0."""
    config = model.generation_config
    defaults: dict[str, Any] = {"repetition_penalty": config.repetition_penalty or 1.0}
    if "temperature" not in given:
        temperature = 1.0 if config.temperature is None else config.temperature
        defaults["temperature"] = temperature if config.do_sample else 0.0
    if config.do_sample:
        defaults |= {name: getattr(config, name) for name in NAMES if getattr(config, name) is not None}
    return {**defaults, **given}
