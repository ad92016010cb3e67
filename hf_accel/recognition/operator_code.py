"""Code that attends by torch's operators, or to other keys and values than its cache returns."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

from .cache_code import CACHE_NAMES, CHANGES_KEYS, MORE_THAN_ONCE
from .call_form import parameter_names
from .code import BY_ITSELF, attention_code, code_of, functions_of
from .source import nodes_of


@lru_cache(maxsize=4096)
def attends_by_operators(kind: type) -> bool:
    """Return whether modules of a class update a cache, and then attend by torch's operators."""
    refusal = attention_code(kind).refusal
    functions = functions_of(kind, frozenset()) if refusal is not None and refusal.endswith(BY_ITSELF) else None
    nodes = (node for function in functions or () for node in nodes_of(function))
    return any(isinstance(node, ast.Attribute) and node.attr == "update" for node in nodes)


@lru_cache(maxsize=4096)
def attends_without_cache(kind: type) -> bool:
    """Return whether modules of a class attend by torch's operators, and take no cache."""
    refusal, forward = attention_code(kind).refusal, getattr(kind, "forward", None)
    by_itself = refusal is not None and refusal.endswith(BY_ITSELF) and forward is not None
    return by_itself and not CACHE_NAMES & {*parameter_names(forward)}


def attends_to_changed_keys(module: Any) -> bool:
    """Return whether a module updates a cache, and makes other keys and values of what that returns, for one or more
    calls of an attention function of transformers' interface."""
    code = code_of(module)
    return code.attends and code.unpaged is not None and code.unpaged.endswith((CHANGES_KEYS, MORE_THAN_ONCE))
