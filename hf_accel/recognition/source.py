"""The source of a function: as text, as a tree, and as lines without differences of form."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FunctionType
from typing import Any

RENAMES = "transformers.utils.deprecation"  # whose wrappers hand on arguments by their newer names, and do no more
STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def is_renaming(function: Any) -> bool:
    """Return whether a function only hands on arguments by their newer names: one of deprecate_kwarg."""
    in_file = isinstance(function, FunctionType) and function.__globals__.get("__name__") == RENAMES
    return in_file and hasattr(function, "__wrapped__")


def without_renaming(function: Any) -> Any:
    """Return the function that wrappers hand arguments on to by their newer names; the function itself without any."""
    while is_renaming(function):
        function = function.__wrapped__
    return function


@lru_cache(maxsize=8192)
def source_of(function: Any) -> str | None:
    """Return the source of a function or a class; None if there is none, as for code that was typed at a prompt."""
    try:
        return _source_of_class(function) if isinstance(function, type) else inspect.getsource(function)
    except (OSError, TypeError):
        return None


def _source_of_class(kind: type) -> str:
    """Return what inspect.getsource does, which parses the whole file for each class of it before Python 3.13."""
    file = inspect.getsourcefile(kind)
    if file is None:
        return inspect.getsource(kind)
    linecache.checkcache(file)
    lines = linecache.getlines(file, vars(sys.modules[kind.__module__]))
    span = classes_in("".join(lines)).get(kind.__qualname__)
    return inspect.getsource(kind) if span is None else "".join(lines[span])


@lru_cache(maxsize=16)  # it holds the texts of these files
def classes_in(text: str) -> dict[str, slice]:
    """Return the lines of each class in the text of a file, by its qualified name; of two, those of the first."""
    try:
        return dict(reversed([*_classes(ast.parse(text))]))
    except SyntaxError:  # what is read by now is not what was imported
        return {}


def _classes(node: ast.AST, around: str = "") -> Iterator[tuple[str, slice]]:
    for child in (each for each in ast.iter_child_nodes(node) if isinstance(each, STATEMENTS)):
        if isinstance(child, ast.ClassDef):
            first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
            yield around + child.name, slice(first - 1, child.end_lineno)
            yield from _classes(child, f"{around}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _classes(child, f"{around}{child.name}.<locals>.")
        else:
            yield from _classes(child, around)


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
