"""The token ids that a model knows."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...errors import UnsupportedError


def vocabulary_size(model: Any) -> int:
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return size


def check_ids(model: Any, ids: Sequence[int], name: str) -> None:
    """Raise UnsupportedError unless the model has an embedding for each of these ids, of which there is one."""
    size = vocabulary_size(model)
    if min(ids) < 0 or max(ids) >= size:
        raise UnsupportedError(f"{name} holds token ids from {min(ids)} to {max(ids)}; the model has 0 to {size - 1}")


def token_ids(prompt: Any) -> list[int]:
    """The ids of one prompt: of an iterable of integers of any kind, or of a tensor or array [T] or [1, T].

    Raises UnsupportedError, with what to give instead, for anything else.
    """
    if isinstance(prompt, Mapping):
        raise UnsupportedError("prompt is a dict, as a tokenizer returns it; submit its ids: prompt['input_ids']")
    if isinstance(prompt, Tensor) or hasattr(prompt, "__array__"):
        if len(prompt.shape) != 1 and tuple(prompt.shape[:-1]) != (1,):
            raise UnsupportedError(
                f"prompt has the shape {tuple(prompt.shape)}; submit each row of token ids by itself"
            )
        prompt = prompt.reshape(-1).tolist()
    try:
        given = list(prompt)
        if len(given) == 1 and isinstance(given[0], list | tuple):  # as tokenizers return a batch of one
            given = list(given[0])
        ids = [operator.index(token) for token in given if not isinstance(token, bool)]
    except TypeError:
        ids = []
    if not ids or len(ids) != len(given):
        raise UnsupportedError(_refused(prompt))
    return ids


def _refused(prompt: Any) -> str:
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else None
    if isinstance(first, Mapping) and "role" in first:
        return (
            "prompt is a list of chat messages; submit tokenizer.apply_chat_template(messages, "
            "add_generation_prompt=True, return_dict=False)"
        )
    if isinstance(first, str):
        return "prompt is a list of texts; submit each by itself, to an Engine that was given a tokenizer="
    return f"prompt must be a list of at least one token id, not {prompt!r}"
