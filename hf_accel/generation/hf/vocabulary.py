"""The token ids that a model knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import UnsupportedError


def vocabulary_size(model: Any) -> int:
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return size


def check_ids(model: Any, ids: Sequence[int], name: str) -> None:
    """Raise UnsupportedError unless the model has an embedding for each of these ids, of which there is one."""
    size = vocabulary_size(model)
    if min(ids) < 0 or max(ids) >= size:
        raise UnsupportedError(f"{name} holds token ids from {min(ids)} to {max(ids)}; the model has 0 to {size - 1}")
