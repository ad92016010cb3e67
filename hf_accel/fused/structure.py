"""What a module's forward does, read from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=4096)
def siblings(forward: Callable[..., Any]) -> tuple[tuple[str, ...], ...]:
    """Names of the submodules that `forward` calls on one and the same variable, in the order of the calls.

    Only calls `self.name(variable)` count, and only variables that are never assigned to after the first of them.
    """
    tree = _tree(forward)
    if tree is None:
        return ()
    groups: dict[str, list[str]] = {}
    first_line: dict[str, int] = {}
    for node in sorted((n for n in ast.walk(tree) if isinstance(n, ast.Call)), key=lambda n: (n.lineno, n.col_offset)):
        if _is_own_attribute(node.func) and len(node.args) == 1 and not node.keywords:
            argument = node.args[0]
            if isinstance(argument, ast.Name):
                groups.setdefault(argument.id, []).append(node.func.attr)  # type: ignore[attr-defined]
                first_line.setdefault(argument.id, node.lineno)
    changed = Counter(name for name, line in _assignments(tree) if line >= first_line.get(name, line + 1))
    return tuple(
        tuple(names)
        for variable, names in groups.items()
        if len(names) > 1 and len(set(names)) == len(names) and not changed[variable]
    )


@lru_cache(maxsize=4096)
def own_names(forward: Callable[..., Any]) -> frozenset[str] | None:
    """The attributes and globals that `forward` names, None where it branches, loops or holds constants."""
    tree = _tree(forward)
    if tree is None:
        return None
    names: set[str] = set()
    body = [node for statement in tree.body for node in ast.walk(statement)]
    for node in body:
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.If | ast.For | ast.While | ast.Constant | ast.IfExp | ast.Lambda | ast.Try):
            return None
    return frozenset(names)


def _tree(forward: Callable[..., Any]) -> ast.FunctionDef | None:
    try:
        module = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # what was typed at a prompt has no source file
        return None
    node = module.body[0]
    return node if isinstance(node, ast.FunctionDef) else None


def _is_own_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _assignments(tree: ast.FunctionDef) -> list[tuple[str, int]]:
    stored = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return [(node.id, node.lineno) for node in stored]
