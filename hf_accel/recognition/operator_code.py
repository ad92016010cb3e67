"""Code that takes keys and values from a cache, and attends by torch's operators."""

from __future__ import annotations

import ast
from functools import lru_cache

from .code import BY_ITSELF, attention_code, functions_of


@lru_cache(maxsize=4096)
def attends_by_operators(kind: type) -> bool:
    """Return whether modules of a class update a cache, and then attend by torch's operators."""
    refusal = attention_code(kind).refusal
    functions = functions_of(kind, frozenset()) if refusal is not None and refusal.endswith(BY_ITSELF) else None
    nodes = (node for function in functions or () for node in ast.walk(function))
    return any(isinstance(node, ast.Attribute) and node.attr == "update" for node in nodes)
