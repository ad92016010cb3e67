"""Facts about the masks of attention, read in the code that makes them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from ..models import answer_once
from .cache_code import assignments, names_in
from .code import absent_parts, functions_of


def adds_to_masks(module: Any) -> bool:
    """Return whether a module's code adds something to a mask, such as a bias of positions.

    Branches that need a part which it does not have are left out.
    """
    absent = absent_parts(module)
    return answer_once(_adds_to_masks, (type(module), absent), equal=(type(module), absent))


def _adds_to_masks(code: tuple[type, frozenset[str]]) -> bool:
    functions = functions_of(*code) or ()
    made = (assigned for function in functions for assigned in assignments(function))
    sums = (each for value, target in made if _is_mask(target) and value is not None for each in _sums(value))
    return any(isinstance(side, ast.Name) and _is_mask(side) for each in sums for side in (each.left, each.right))


def _is_mask(node: ast.expr) -> bool:
    return any("mask" in name for name in names_in(node))


def _sums(value: ast.expr) -> Iterator[ast.BinOp]:
    yield from (node for node in ast.walk(value) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add))
