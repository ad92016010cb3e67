"""The code of a function as a syntax tree, for the rooms that know a module by what its forward does."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=8192)
def text(function: Any) -> str | None:
    """The source of a function or a class; None if there is none, as for what was typed at a prompt."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return None


@lru_cache(maxsize=8192)
def tree(function: Any) -> ast.FunctionDef | None:
    """The definition of a function; None if its source cannot be read, or it is a lambda. Not to be changed."""
    code = text(function)
    if code is None:
        return None
    try:
        node = ast.parse(textwrap.dedent(code)).body[0]
    except SyntaxError:  # a piece of a line
        return None
    return node if isinstance(node, ast.FunctionDef) else None
