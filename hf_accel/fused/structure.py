"""What a module's forward does, read from its source."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch.nn.functional as F

from .. import source


@lru_cache(maxsize=4096)
def siblings(forward: Callable[..., Any]) -> tuple[tuple[str, ...], ...]:
    """Names of the submodules that `forward` calls on one and the same variable, in the order of the calls.

    Only calls `self.name(variable)` count, and only variables that are never assigned to after the first of them.
    """
    tree = source.tree(forward)
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


@dataclass(frozen=True)
class GatedCode:
    """Names of the submodules of down(act(gate(x)) * up(x)). activation: an attribute's name, or a torch function."""

    gate: str
    up: str
    down: str
    activation: str | Callable[..., Any]


@lru_cache(maxsize=4096)
def gated_code(forward: Callable[..., Any]) -> GatedCode | None:
    """The parts of a forward that is down(act(gate(x)) * up(x)) and nothing else; None for any other."""
    tree = source.tree(forward)
    if tree is None or len(arguments := tree.args.args) != 2 or tree.args.vararg or tree.args.kwonlyargs:
        return None
    x = arguments[1].arg
    match _result(tree):
        case ast.Call(func=down, args=[ast.BinOp(left=left, op=ast.Mult(), right=right)], keywords=[]):
            gated, other = (left, right) if isinstance(_argument(left), ast.Call) else (right, left)
        case _:
            return None
    inner = _argument(gated)
    if not (isinstance(gated, ast.Call) and isinstance(inner, ast.Call) and isinstance(other, ast.Call)):
        return None
    if _name(_argument(inner)) != x or _name(_argument(other)) != x:
        return None
    gate, up, own_down = (_own_name(func) for func in (inner.func, other.func, down))
    activation = _own_name(gated.func) or _torch_function(gated.func, forward)
    if gate is None or up is None or own_down is None or activation is None:
        return None
    return GatedCode(gate, up, own_down, activation) if len({gate, up, own_down, activation}) == 4 else None


def _result(tree: ast.FunctionDef) -> ast.expr | None:
    """What straight-line code returns, with the variables that it assigns replaced by what they stand for."""
    values: dict[str, ast.expr] = {}
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


def _argument(node: ast.expr | None) -> ast.expr | None:
    """The argument of a call that has no other."""
    return node.args[0] if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords else None


def _name(node: ast.expr | None) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _own_name(node: ast.expr) -> str | None:
    return node.attr if _is_own_attribute(node) else None  # type: ignore[attr-defined]


def _torch_function(node: ast.expr, forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function of torch.nn.functional that code names by whatever it calls the module, F.silu say."""
    path = ast.unparse(node).split(".")
    found: Any = getattr(forward, "__globals__", {}).get(path[0])
    for name in path[1:]:
        found = getattr(found, name, None)
    known = callable(found) and getattr(F, getattr(found, "__name__", ""), None) is found
    return found if known else None


def _is_own_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _assignments(tree: ast.FunctionDef) -> list[tuple[str, int]]:
    stored = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return [(node.id, node.lineno) for node in stored]
