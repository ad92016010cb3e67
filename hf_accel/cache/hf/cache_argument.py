"""The name of the cache among the arguments and outputs of transformers' models and layers.

It is `cache` from transformers 5.24 on, and `past_key_values` before, or `cache_params` in recurrent layers. The older
names still work there, with a warning at each call; who looks for them in what a model gives its layers finds nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

from ...undo.journal import original_class

CACHE_NAMES = ("past_key_values", "cache", "cache_params", "state")  # the last one is RWKV's
CACHE_NAME = next(field.name for field in fields(BaseModelOutputWithPast) if field.name in CACHE_NAMES)
STATES_NAME = CACHE_NAME if CACHE_NAME == "cache" else "cache_params"  # of recurrent layers


def cache_name(model: object) -> str:
    """Return the name of the cache among the arguments of a model, patched or not."""
    return _cache_name(original_class(model))


def cache_given(inputs: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call of a model, whose caller may still use an older name."""
    return next((cache for name in CACHE_NAMES if (cache := inputs.get(name)) is not None), None)


@lru_cache(maxsize=256)
def _cache_name(kind: Any) -> str:
    names = inspect.signature(kind.forward).parameters
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAME)
