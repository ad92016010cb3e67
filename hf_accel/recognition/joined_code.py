"""Code that attends to the keys of two caches at once: T5Gemma 2 does so, to tokens and an encoder's output."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

from .code import attention_code, functions_of
from .source import nodes_of


def attends_to_joined_keys(module: Any) -> bool:
    """Return whether a module updates two caches, and attends once to the keys of both, end to end."""
    kind: Any = type(module)
    return _joins_keys(kind)


@lru_cache(maxsize=4096)
def _joins_keys(kind: type) -> bool:
    functions = functions_of(kind, frozenset()) if attention_code(kind).attends else None
    nodes = [node for function in functions or () for node in nodes_of(function)]
    called = [node.func.attr for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return called.count("update") == 2 and called.count("cat") == 2
