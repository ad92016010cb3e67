"""A function's source: its syntax tree, and patterns in that of a module's forward."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch.nn.functional as F


@lru_cache(maxsize=8192)
def text(function: Any) -> str | None:
    """Return the source of a function or a class; None if there is none, as for code that was typed at a prompt."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return None


@lru_cache(maxsize=8192)
def tree_of(function: Any) -> ast.FunctionDef | None:
    """Return the definition of a function, which must not be changed; None for a lambda or without readable source."""
    code = text(function)
    if code is None:
        return None
    try:
        node = ast.parse(textwrap.dedent(code)).body[0]
    except SyntaxError:  # a piece of a line
        return None
    return node if isinstance(node, ast.FunctionDef) else None


@lru_cache(maxsize=4096)
def siblings(forward: Callable[..., Any]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the submodules that `forward` calls on one variable, in the order of the calls.

    Only calls `self.name(variable)` count, and only variables that are never assigned to after the first of them.
    """
    tree = tree_of(forward)
    if tree is None:
        return ()
    groups: dict[str, list[str]] = {}
    first_line: dict[str, int] = {}
    for node in sorted((n for n in ast.walk(tree) if isinstance(n, ast.Call)), key=lambda n: (n.lineno, n.col_offset)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=layer), args=[ast.Name(id=variable)], keywords=[]
            ):
                groups.setdefault(variable, []).append(layer)
                first_line.setdefault(variable, node.lineno)
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    changed = {n.id for n in stored if n.id in groups and n.lineno >= first_line[n.id]}
    return tuple(
        tuple(names)
        for variable, names in groups.items()
        if len(names) > 1 and len(set(names)) == len(names) and variable not in changed
    )


@dataclass(frozen=True)
class GatedCode:
    """The submodules' names in down(act(gate(x)) * up(x)). activation: an attribute's name, or a torch function."""

    gate: str
    up: str
    down: str
    activation: str | Callable[..., Any]


INPUT = "$"  # stands for the input in code that is compared; no variable has such a name
GATED, UP = r"(?P<activation>[\w.]+)\(self\.(?P<gate>\w+)\(\$\)\)", r"self\.(?P<up>\w+)\(\$\)"
MLPS = tuple(rf"self\.(?P<down>\w+)\({product}\)" for product in (rf"{GATED} \* {UP}", rf"{UP} \* {GATED}"))


@lru_cache(maxsize=4096)
def gated_code(forward: Callable[..., Any]) -> GatedCode | None:
    """Return the parts of a forward that is down(act(gate(x)) * up(x)) and nothing else; None for any other."""
    tree = tree_of(forward)
    if tree is None or len(arguments := tree.args.args) != 2 or tree.args.vararg or tree.args.kwonlyargs:
        return None
    result = _result(tree, {arguments[1].arg: ast.Name(INPUT)})
    code = "" if result is None else ast.unparse(result)
    found = next((match for mlp in MLPS if (match := re.fullmatch(mlp, code))), None)
    if found is None:
        return None
    holder, _, name = found["activation"].rpartition(".")
    activation = name if holder == "self" else _torch_function(found["activation"], forward)
    names = {found["gate"], found["up"], found["down"], activation}
    if activation is None or len(names) < 4:
        return None
    return GatedCode(found["gate"], found["up"], found["down"], activation)


def _result(tree: ast.FunctionDef, values: dict[str, ast.expr]) -> ast.expr | None:
    """Return the result of straight-line code, with its variables replaced by their values.

    values: the inputs; assigned variables are added. None where a variable is assigned twice.
    """
    statements = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in values:
                values[name] = _Inline(values).visit(copy.deepcopy(value))
            case ast.Return(value=ast.expr() as value) if statement is statements[-1]:
                result: ast.expr = _Inline(values).visit(copy.deepcopy(value))
                return result
            case _:
                return None
    return None


class _Inline(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)


def _torch_function(name: str, forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function of torch.nn.functional that code names, under any name of the module, such as F.silu."""
    first, *rest = name.split(".")
    found: Any = getattr(forward, "__globals__", {}).get(first)
    for part in rest:
        found = getattr(found, part, None)
    known = callable(found) and getattr(F, getattr(found, "__name__", ""), None) is found
    return found if known else None
