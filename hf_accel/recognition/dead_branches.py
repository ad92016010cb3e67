"""Code without the branches that do not run where a module lacks a part, or is a decoder's."""

from __future__ import annotations

import ast
import operator
from typing import Any


class DeadBranches(ast.NodeVisitor):
    """Leaves out branches that run only with an encoder's output, or with a part that is None.

    A node in which something is left out is a copy; all others are those of the tree that is visited.
    """

    def __init__(self, absent: frozenset[str]) -> None:
        self.absent = absent

    def generic_visit(self, node: ast.AST) -> Any:
        changed: dict[str, Any] = {}
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                kept = self._all(value)
                if len(kept) != len(value) or any(map(operator.is_not, kept, value)):
                    changed[name] = kept
            elif isinstance(value, ast.AST) and (kept := self.visit(value)) is not value:
                changed[name] = kept
        return node if not changed else type(node)(**{**vars(node), **changed})

    def _all(self, nodes: list[Any]) -> list[Any]:
        visited = (self.visit(node) if isinstance(node, ast.AST) else node for node in nodes)
        return [each for found in visited for each in (found if isinstance(found, list) else [found])]

    def visit_If(self, node: ast.If) -> Any:
        truth = self._truth(node.test)
        if truth is None:
            return self.generic_visit(node)
        return self._all(node.body if truth else node.orelse) or ast.copy_location(ast.Pass(), node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        truth = self._truth(node.test)
        return self.generic_visit(node) if truth is None else self.visit(node.body if truth else node.orelse)

    def _truth(self, test: ast.AST) -> bool | None:
        """Return the value of a condition; None where it is not known."""
        match test:
            case ast.Name(id="is_cross_attention") | ast.Attribute(attr="is_cross_attention"):
                return False
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, ast.Name(id="EncoderDecoderCache")]):
                return False
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in self.absent:
                return False
            case ast.Compare(
                left=ast.Attribute(attr="_attn_implementation"), ops=[ast.In()], comparators=[ast.Tuple()]
            ):
                return False  # of names of transformers' own functions
            case ast.Compare(
                left=ast.Attribute(value=ast.Name(id="self"), attr=name),
                ops=[ast.Is() | ast.IsNot() as how],
                comparators=[ast.Constant(value=None)],
            ) if name in self.absent:
                return isinstance(how, ast.Is)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                truth = self._truth(operand)
                return None if truth is None else not truth
            case ast.BoolOp(op=op, values=values):
                truths = [self._truth(value) for value in values]
                decisive = isinstance(op, ast.Or)
                if decisive in truths:
                    return decisive
                return None if None in truths else not decisive
        return None
