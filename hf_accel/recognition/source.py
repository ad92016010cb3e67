"""The source of a function: as text, as a tree, and as lines without differences of form."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=8192)
def source_of(function: Any) -> str | None:
    """Return the source of a function or a class; None if there is none, as for code that was typed at a prompt."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return None


@lru_cache(maxsize=8192)
def tree_of(function: Any) -> ast.FunctionDef | None:
    """Return the definition of a function, which must not be changed; None for a lambda or without readable source."""
    code = source_of(function)
    if code is None:
        return None
    try:
        node = ast.parse(textwrap.dedent(code)).body[0]
    except SyntaxError:  # a piece of a line
        return None
    return node if isinstance(node, ast.FunctionDef) else None


@lru_cache(maxsize=64)  # many questions are asked of one tree, and then of the next
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of a tree, which must not be changed, in the order of ast.walk."""
    return tuple(ast.walk(tree))


@lru_cache(maxsize=1024)
def lines_of(function: Any) -> tuple[str, ...]:
    """Return the lines of a function's code as ast.unparse writes them, without blanks around them."""
    tree = tree_of(function)
    return () if tree is None else tuple(line.strip() for line in ast.unparse(tree).splitlines())


def results_of(forward: Callable[..., Any]) -> int | None:
    """Return how many results are in the tuple that a function returns everywhere; None if it returns no tuple."""
    tree = tree_of(forward)
    returned = [] if tree is None else [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    sizes = {len(value.elts) if isinstance(value, ast.Tuple) else None for value in returned}
    return sizes.pop() if len(sizes) == 1 else None
